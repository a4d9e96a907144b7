"""Triton kernels of the CUDA path. Each file needs triton (the extra `gpu`); the engine imports them on CUDA only.

A wrapper checks shapes, strides and dtypes and launches; the `*_reference` beside it says in plain torch what it
computes. Nothing here knows of requests, blocks' owners or weights.

Sizes that change from batch to batch are neither `constexpr` nor specialised on: a new value must not compile anew.
"""
