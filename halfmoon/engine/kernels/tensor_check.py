"""Checks that every wrapper makes on its tensors before launching: a kernel that reads past a tensor fails silently.

They run hundreds of times a step while the device waits, and so are written for speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton import knobs

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_IS_INTERPRETED = knobs.runtime.interpret  # as `triton.jit` found it


def check_tensor(name: str, tensor: Tensor, shape: Sequence[int | None], dtypes: Sequence[torch.dtype]) -> None:
    """Checks shape (None is any size), dtype, and a dense last dimension. Raises ValueError or TypeError.

    Refuses bfloat16 in Triton's interpreter, which silently computes it incorrectly.
    """
    if tensor.shape != shape:  # some sizes are any, or wrong
        check_shape(name, tensor, shape)
    dtype = tensor.dtype
    if dtype not in dtypes:
        raise TypeError(f"{name}: dtype {dtype} is not one of {', '.join(map(str, dtypes))}")
    if _IS_INTERPRETED and dtype is torch.bfloat16:
        raise TypeError(f"{name}: Triton's interpreter computes bfloat16 incorrectly; use float16 or float32")
    if tensor.stride()[-1] != 1 and tensor.shape[-1] > 1 and tensor.numel():
        raise ValueError(f"{name}: the last dimension must be dense, its stride is {tensor.stride(-1)}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int | None]) -> None:
    """Raises ValueError unless the shape matches; None is any size."""
    sizes = tensor.shape
    if len(shape) == len(sizes):
        for want, size in zip(shape, sizes, strict=True):
            if want is not None and want != size:
                break
        else:
            return
    raise ValueError(f"{name}: shape {tuple(sizes)} where {tuple(shape)} is needed")


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless the tensor is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: must be contiguous, its strides are {tensor.stride()}")


def check_same_device(**tensors: Tensor | None) -> None:
    """Raises ValueError unless all tensors are on one device."""
    first = None
    for tensor in tensors.values():
        if tensor is None:
            continue
        if first is None:
            first = tensor.device
        elif tensor.device != first:
            devices = {name: str(one.device) for name, one in tensors.items() if one is not None}
            raise ValueError(f"tensors on different devices: {devices}")
