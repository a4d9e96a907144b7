"""Device memory that worker processes of one host share through CUDA IPC, as torch's own multiprocessing does.

Torch's handle for an allocation names the whole block that it came from and the region's offset in it. Torch keeps the
memory of a region that is dropped here until the other process has released it. The calls are those behind
`torch.multiprocessing.reductions`, without its pickle, which must not be read from a peer.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor

from halfmoon.errors import Incompatible, Unavailable
from halfmoon.kv.device_bytes import DeviceBytes
from halfmoon.kv.kv_layout import KVLayout


class CudaRegion:
    """A run of device memory that this process allocated, or that another process opened to it."""

    def __init__(self, cells: Tensor) -> None:
        """cells: [num_bytes] uint8."""
        self._cells = cells
        self.num_bytes = cells.numel()

    def part(self, offset: int, num_bytes: int) -> DeviceBytes:
        """Part of the region; keeps all of it alive."""
        return DeviceBytes(num_bytes, self._cells[offset : offset + num_bytes])


class CudaMemory:
    """The device of one worker. Only workers with equal layouts, dtype included, share: nothing converts on the way."""

    def __init__(self, layout: KVLayout) -> None:
        self._fingerprint = layout.fingerprint()
        self._device = torch.device("cuda", torch.cuda.current_device())

    def allocate(self, num_bytes: int) -> tuple[CudaRegion, bytes]:
        """A new region, and what `open` needs in another process. Raises Unavailable if it cannot be had or shared."""
        try:
            cells = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            # The allocator may return memory that an earlier kernel on another stream still uses.
            torch.cuda.synchronize(self._device)
            shared = cells.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        except RuntimeError as err:
            raise Unavailable(f"CUDA cannot share memory here: {err}") from err
        _, handle, size, offset, counter, counter_offset, event, _ = shared
        exported = {
            "process": os.getpid(),
            "layout": self._fingerprint,
            "gpu": _uuid(self._device.index),
            "handle": bytes(handle).hex(),
            "num_bytes": size,
            "offset": offset,  # the region's offset in the block that the handle names
            "counter": bytes(counter).hex(),
            "counter_offset": counter_offset,
            "event": bytes(event).hex(),
        }
        return CudaRegion(cells), json.dumps(exported).encode()

    def open(self, exported: bytes) -> CudaRegion:
        """Opens another process's region. Raises Incompatible or Unavailable with the reason."""
        try:
            sender = json.loads(exported)
            self._check(sender)
            storage = self._opened(sender)
        except (KeyError, TypeError, ValueError) as err:
            raise Incompatible(f"the sender's description of its device memory makes no sense: {err!r}") from err
        except (RuntimeError, OSError) as err:
            raise Unavailable(f"CUDA cannot open the sender's memory: {err}") from err
        return CudaRegion(torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage))

    def _check(self, sender: dict[str, Any]) -> None:
        """Raises Incompatible where CUDA would fail, or the bytes would be misread."""
        if sender["process"] == os.getpid():
            raise Incompatible("sender and receiver are one process, and CUDA opens no handle in its own")
        if sender["layout"] != self._fingerprint:
            raise Incompatible("the two workers' KV differs in layout or dtype")
        theirs = _index(sender["gpu"])  # indices differ between processes: CUDA_VISIBLE_DEVICES renumbers GPUs
        mine = self._device.index
        if theirs not in (None, mine) and not torch.cuda.can_device_access_peer(mine, theirs):
            raise Incompatible("the two workers' GPUs cannot reach each other's memory")

    def _opened(self, sender: dict[str, Any]) -> Any:
        """The storage, [num_bytes], opened on this device: CUDA opens memory even of a GPU that is invisible here."""
        return torch.UntypedStorage._new_shared_cuda(
            self._device.index,
            bytes.fromhex(sender["handle"]),
            sender["num_bytes"],
            sender["offset"],
            bytes.fromhex(sender["counter"]),
            sender["counter_offset"],
            bytes.fromhex(sender["event"]),
            False,  # nothing to wait for: a frame is announced once its payload is complete
        )


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _index(uuid: str) -> int | None:
    """The GPU's index here, None if it is invisible."""
    return next((index for index in range(torch.cuda.device_count()) if _uuid(index) == uuid), None)
