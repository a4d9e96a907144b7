"""Weights in GGUF's blocks: some bits for each number, and a scale for each 32 or 256 inputs of an output.

The formats are llama.cpp's (ggml-quants.c). Knows nothing of the kernels that multiply with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from halfmoon.errors import Incompatible

BlockFormat = Literal["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]

BLOCK_SIZES: Mapping[BlockFormat, tuple[int, int]] = {  # inputs and bytes of a block
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "IQ4_NL": (32, 18),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_XS": (256, 136),
}


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight [out_features, in_features]. `data`: its rows as a file has them, [out_features, bytes] uint8."""

    format: BlockFormat
    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features]."""
        inputs, num_bytes = BLOCK_SIZES[self.format]
        return self.data.shape[0], self.data.shape[1] // num_bytes * inputs

    def numbers(self, where: tuple[slice, ...]) -> Tensor:
        """All weights in float32, or those of outputs, or of outputs and inputs, `where`."""
        from gguf import GGMLQuantizationType, dequantize  # a tenth of a second that others need not wait for

        rows, inputs = (*where, slice(None), slice(None))[:2]
        values = dequantize(self.data[rows].numpy(), GGMLQuantizationType[self.format])
        return torch.from_numpy(values)[:, inputs]

    def cut(self, name: str, where: tuple[slice, ...]) -> Blocks:
        """Outputs, or outputs and inputs, `where` as `ModelPart.slices` has them.

        Raises Incompatible for inputs that are not whole blocks.
        """
        rows, inputs = (*where, slice(None))[:2]
        size, num_bytes = BLOCK_SIZES[self.format]
        start, end, _ = inputs.indices(self.shape[1])
        if start % size or end % size:
            num_parts = self.shape[1] // (end - start)
            raise Incompatible(
                f"tensor {name} is stored in {self.format} blocks of {size} inputs, which {num_parts} ranks cannot "
                "divide: use fewer (--tensor-parallel), or --quantization none",
                param="tensor_parallel",
            )
        return replace(self, data=self.data[rows, start // size * num_bytes : end // size * num_bytes])


def joined(first: Blocks, second: Blocks) -> Blocks:
    """The outputs of both, which have one format."""
    if first.data.is_meta:  # without bytes; torch's own way there imports for a second
        rows = first.data.shape[0] + second.data.shape[0]
        return replace(first, data=torch.empty(rows, first.data.shape[1], dtype=torch.uint8, device="meta"))
    return replace(first, data=torch.cat((first.data, second.data)))


def quantised(weight: Tensor, block_format: Literal["Q8_0", "Q4_1"]) -> Blocks | None:
    """A weight [out_features, in_features] in blocks, each number rounded to the nearest; None: inputs do not divide.

    Q8_0: round(x / scale); Q4_1: round((x - low) / scale). Scale and low are rounded to float16 first.
    """
    num_rows, num_inputs = weight.shape
    if num_inputs % 32 or not num_inputs:
        return None
    numbers = weight.float().view(num_rows, -1, 32)
    if block_format == "Q8_0":
        scale = (numbers.abs().amax(-1, keepdim=True) / 127).half()
        codes = _rounded(numbers, scale, -127, 127).to(torch.int8).view(torch.uint8)
        parts = [scale.view(torch.uint8), codes]
    else:
        low = numbers.amin(-1, keepdim=True).half()
        scale = ((numbers.amax(-1, keepdim=True) - low.float()) / 15).half()
        codes = _rounded(numbers - low.float(), scale, 0, 15).to(torch.uint8)
        parts = [scale.view(torch.uint8), low.view(torch.uint8), codes[..., :16] | codes[..., 16:] << 4]
    return Blocks(block_format, torch.cat(parts, -1).view(num_rows, -1))


def _rounded(numbers: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    return torch.where(scale > 0, numbers / scale.float(), 0).round().clamp(least, most)
