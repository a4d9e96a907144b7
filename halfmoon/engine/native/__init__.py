"""The CPU path's own kernels: C, compiled by the machine's compiler for exactly its processor on first use.

torch computes the matrix products; what lies between them, and attention, is here. Without a compiler the torch code
beside it (`attention.py`, `models/layer_ops.py`) does the same more slowly.
"""
