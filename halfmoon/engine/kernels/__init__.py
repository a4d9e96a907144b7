"""Triton kernels of the CUDA path. Each file needs triton (the extra `gpu`); the engine imports them only on CUDA.

A wrapper checks shapes, strides and dtypes and launches; its `*_reference` defines in plain torch what it computes.
Nothing here knows of requests, block owners or weights.

Sizes that change from batch to batch are neither `constexpr` nor specialised on: a new value must not recompile.

Read in this order: paged_kv, kv_write, prefill_attention, key_splits, decode_attention, mixed_attention,
latent_attention, block_copy, tensor_check, tile_counts.
"""
