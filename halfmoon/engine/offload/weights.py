"""Weights of some layers in host memory: a layer's come to one of two buffers while layers before it compute.

A pass reads them once, whatever its rows. So with KV on the host, too, the schedule "throughput" (FlexGen's columns:
all groups pass a layer while its weights are here) loads them once a step, and "latency" (rows) once for each group.
(FlexGen, arXiv 2303.06865, section 4.)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from halfmoon.engine.models.blocks import Blocks
from halfmoon.engine.models.linear import FusedRows, Multiply, PackWeight, sums
from halfmoon.engine.native.prepared_model import PackedWeight, Packing
from halfmoon.engine.offload.link import Copy, Fetch, Link, Throttle, link_to
from halfmoon.errors import Incompatible
from halfmoon.policy.offload.host_choice import num_host_layers

logger = logging.getLogger(__name__)

_ALIGNED_BYTES = 64  # of a matrix in a buffer
_NO_LAYER = -1


class WeightWork(NamedTuple):
    """What was done for weights on the host. Nothing waits on CUDA, where the device does."""

    num_bytes: int = 0
    wait_s: float = 0.0


def layers_on_host(num_layers: int, share: float) -> frozenset[int]:
    """That share of the layers, spread evenly: while one is loaded, those between compute."""
    num = num_host_layers(num_layers, share)
    return frozenset(n for n in range(num_layers) if (n + 1) * num // num_layers > n * num // num_layers)


def weight_stream(
    layers: frozenset[int], device: torch.device, throttle: Throttle, packing: Packing | None
) -> WeightStream | None:
    """A stream for these layers of a model; None: all weights are on the device."""
    return WeightStream(layers, link_to(device, throttle), device, packing) if layers else None


class WeightStream:
    """Owns two buffers on the device, each with room for a layer's matrices, and the fetches into them.

    The layers take turns, over and over: once one is used the next one is fetched, for the next pass after the last. A
    pass that begins anywhere else costs a fetch that nothing hides. With two layers or one, nothing is loaded twice.
    """

    def __init__(self, layers: frozenset[int], link: Link, device: torch.device, packing: Packing | None) -> None:
        """packing: how packed weights are multiplied with, if they are."""
        order = sorted(layers)
        self._following = dict(zip(order, [*order[1:], *order[:1]], strict=True))
        self._matrices: dict[int, list[StreamedWeight]] = {layer: [] for layer in order}
        self._link, self._device, self._packing = link, device, packing
        self._held = [_NO_LAYER, _NO_LAYER]  # by each buffer, or soon
        self._fetches: list[Fetch | None] = [None, None]
        self._current = 0  # the buffer in use
        self._work = WeightWork()

    def pack_layer(self, pack_weight: PackWeight, layer: int) -> PackWeight:
        """How the matrices of a layer are packed. Call `begin` once all are."""
        return partial(self._pack, pack_weight, layer) if layer in self._matrices else pack_weight

    def begin(self) -> None:
        """Ends the packing: allocates the buffers and fetches the first layer."""
        layer_bytes = [sum(_aligned(one.source.nbytes) for one in matrices) for matrices in self._matrices.values()]
        buffers = [torch.empty(max(layer_bytes), dtype=torch.uint8, device=self._device) for _ in self._held]
        for matrices in self._matrices.values():
            start = 0
            for matrix in matrices:
                end = start + matrix.source.nbytes
                matrix.place([buffer[start:end] for buffer in buffers])
                start += _aligned(matrix.source.nbytes)
        buffer_bytes = sum(buffer.nbytes for buffer in buffers)
        facts = {"num_layers": len(layer_bytes), "host_bytes": sum(layer_bytes), "buffer_bytes": buffer_bytes}
        logger.info("weights.on_host", extra=facts)
        self._fetch(next(iter(self._following)), 1 - self._current)

    def take(self, layer: int) -> int:
        """The buffer with the layer's weights, valid until another layer is taken. Layers that compute call it."""
        if self._held[self._current] != layer:
            self._advance(layer)
        return self._current

    def take_work(self) -> WeightWork:
        """Work since the last call."""
        work, self._work = self._work, WeightWork()
        return work

    def close(self) -> None:
        """Ends the link."""
        self._link.close()

    def _advance(self, layer: int) -> None:
        other = 1 - self._current
        self._fetch(layer, other)  # unless it is there, as it is but for passes that ended early
        fetch, self._fetches[other] = self._fetches[other], None
        if fetch is not None:
            started_s = time.perf_counter()
            fetch.wait()
            self._work = self._work._replace(wait_s=self._work.wait_s + time.perf_counter() - started_s)
        self._current = other
        self._fetch(self._following[layer], 1 - other)

    def _fetch(self, layer: int, buffer: int) -> None:
        if layer in self._held:
            return
        self._held[buffer] = layer
        copies = [Copy(one.source, one.targets[buffer]) for one in self._matrices[layer]]
        self._fetches[buffer] = self._link.fetch(copies)
        num_bytes = sum(copy.source.nbytes for copy in copies)
        self._work = self._work._replace(num_bytes=self._work.num_bytes + num_bytes)

    def _pack(self, pack_weight: PackWeight, layer: int, weight: Tensor | Blocks) -> Multiply:
        """Raises Incompatible for a weight that is packed in memory which cannot be had."""
        packed = None if self._device.type == "cuda" else pack_weight(weight)
        matrix: StreamedWeight
        if packed is None and isinstance(weight, Tensor):
            source = weight.view(-1).view(torch.uint8)
            matrix = StreamedWeight(self, layer, source, partial(_plain, weight.dtype, weight.shape))
        elif isinstance(packed, PackedWeight) and self._packing is not None:
            kind = StreamedRows if isinstance(packed, FusedRows) else StreamedWeight
            over = partial(_packed, self._packing, packed.format_number, packed.shape)
            matrix = kind(self, layer, torch.from_numpy(packed.memory), over)
        else:
            raise Incompatible(
                "--offload-weights needs our CPU kernels (--attention native, rows of whole items), or a GPU: weights "
                "packed by oneDNN cannot be copied",
                param="offload_weights",
            )
        self._matrices[layer].append(matrix)
        return matrix


class StreamedWeight:
    """A `Multiply` over a matrix in host memory, computed in whichever buffer its layer is."""

    def __init__(self, stream: WeightStream, layer: int, source: Tensor, over: Callable[[Tensor], Multiply]) -> None:
        """source: its bytes [num_bytes] on the host; over: how to multiply with the same bytes in a buffer."""
        self._stream, self._layer, self.source, self._over = stream, layer, source, over
        self.targets: Sequence[Tensor] = ()  # in each buffer, [num_bytes]
        self._multiplies: list[Multiply] = []

    def place(self, targets: Sequence[Tensor]) -> None:
        """Gives it its places in the buffers."""
        self.targets = targets
        self._multiplies = [self._over(target) for target in targets]

    @property
    def here(self) -> Multiply:
        """The matrix on the device, for now."""
        return self._multiplies[self._stream.take(self._layer)]

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Multiply`."""
        return self.here(x, bias)

    def sums(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `KeepsSums`."""
        return sums(self.here, x, bias)


class StreamedRows(StreamedWeight):
    """One that also computes what comes before it (`FusedRows`)."""

    def normed(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        """See `FusedRows.normed`."""
        return self._fused.normed(x, residual, weight, eps, bias)

    def gated(self, gate_up: Tensor, bias: Tensor | None) -> Tensor:
        """See `FusedRows.gated`."""
        return self._fused.gated(gate_up, bias)

    @property
    def _fused(self) -> FusedRows:
        here = self.here
        assert isinstance(here, FusedRows)
        return here


def _packed(packing: Packing, format_number: int, shape: tuple[int, int], memory: Tensor) -> Multiply:
    multiply = packing.multiply(format_number, shape, memory.numpy())
    assert multiply is not None, "the memory has the size of a weight packed in the same way"
    return multiply


def _plain(dtype: torch.dtype, shape: torch.Size, memory: Tensor) -> Multiply:
    weight = memory.view(dtype).view(shape)
    return lambda x, bias: functional.linear(x, weight, bias)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
