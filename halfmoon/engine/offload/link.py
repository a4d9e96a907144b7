"""The link from host memory to the device: one copy after another, while the device computes.

On a CPU, where "device" is a budget, a thread copies; on CUDA a stream does (not run on a GPU yet).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfmoon.engine.kv_memory.kv_arena import INTEGERS


class Copy(NamedTuple):
    """Source and target, views of one shape; their last two axes are contiguous, or they are rows of bytes."""

    source: Tensor
    target: Tensor


class LinkWork(NamedTuple):
    """Work that a link has done."""

    num_bytes: int = 0
    num_fetches: int = 0
    busy_s: float = 0.0


class Fetch(Protocol):
    """Copies in progress."""

    def wait(self) -> None:
        """Makes subsequent computing see what was copied."""


class Link(Protocol):
    """Copies in the order of the calls."""

    def fetch(self, copies: Sequence[Copy]) -> Fetch:
        """Starts the copies; the targets must be free once the device has finished the work launched before."""

    def take_work(self) -> LinkWork:
        """Work since the last call, all of it awaited. Empty where it is not measured."""

    def close(self) -> None:
        """Ends the link."""


class Throttle:
    """Owns the time at which an imagined link is free, for all that share it (for experiments)."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        """None: the link is as fast as copying is."""
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def wait(self, num_bytes: int, started_s: float) -> None:
        """Sleeps until the link would have brought what has been copied since `started_s` (`time.monotonic`)."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            free_at_s = self._free_at_s = max(self._free_at_s, started_s) + num_bytes / self._bytes_per_s
        time.sleep(max(0.0, free_at_s - time.monotonic()))


def link_to(device: torch.device, throttle: Throttle) -> Link:
    """A link to the device; `throttle` slows one that copies on a CPU."""
    return StreamLink(device) if device.type == "cuda" else ThreadLink(throttle)


class ThreadLink:
    """Owns a thread that copies."""

    def __init__(self, throttle: Throttle | None = None) -> None:
        self._throttle = throttle or Throttle()
        self._work = LinkWork()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-offload")

    def fetch(self, copies: Sequence[Copy]) -> Fetch:
        """See `Link.fetch`."""
        return _Copied(self._thread.submit(self._copy, copies))

    def take_work(self) -> LinkWork:
        """See `Link.take_work`."""
        work, self._work = self._work, LinkWork()
        return work

    def close(self) -> None:
        """See `Link.close`."""
        self._thread.shutdown(cancel_futures=True)

    def _copy(self, copies: Sequence[Copy]) -> None:
        started_s = time.monotonic()
        num_bytes = 0
        for source, target in copies:
            np.copyto(_bits(target), _bits(source))  # without torch's threads, which are computing
            num_bytes += source.nbytes
        self._throttle.wait(num_bytes, started_s)
        before = self._work
        busy_s = before.busy_s + time.monotonic() - started_s
        self._work = LinkWork(before.num_bytes + num_bytes, before.num_fetches + 1, busy_s)


class _Copied:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class StreamLink:
    """Owns a stream of a CUDA device. Host memory is pinned. Not run on a GPU yet."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fetch(self, copies: Sequence[Copy]) -> Fetch:
        """See `Link.fetch`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for source, target in copies:
                runs = zip(source.flatten(0, -3), target.flatten(0, -3), strict=True) if source.dim() > 2 else ()
                for run, into in runs or ((source, target),):
                    into.copy_(run, non_blocking=True)  # contiguous at both ends, so no intermediate copy
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _Streamed(event)

    def take_work(self) -> LinkWork:
        """See `Link.take_work`."""
        return LinkWork()

    def close(self) -> None:
        """See `Link.close`."""
        self._stream.synchronize()


class _Streamed:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


def _bits(tensor: Tensor) -> NDArray[np.signedinteger[Any]]:
    """Views a tensor as integers, since numpy has no bfloat16."""
    integers: NDArray[np.signedinteger[Any]] = tensor.view(INTEGERS[tensor.element_size()]).numpy()
    return integers
