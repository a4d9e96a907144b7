"""The CPU path's own kernels: C, compiled on first use by the machine's compiler for its exact processor.

Layers of a model as a whole: products, attention, and everything between. Without a compiler the torch code
(`attention/attention.py`, `models/layer_ops.py`, both of the engine) does the same more slowly.

Read in this order: compiler, library, attention, layer_ops, layers, block_kernels, weight_file, prepared_model,
source/linear.h, source/attention_plan.h, source/attention.h, source/quantised.h.
"""
