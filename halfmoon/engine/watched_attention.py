"""How far a running step has come, layer by layer. A step that nobody watches costs nothing.

A model calls `attend` once a layer, in order, and the call stores that layer's K and V first.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from halfmoon.engine.attention_backend import StepAttention
from halfmoon.engine.kv_watch import LayerWatch


class WatchedAttention:
    """Owns the count of a step's layers that have stored their K and V; attends as `inner` does."""

    def __init__(self, inner: StepAttention, num_layers: int, watch: LayerWatch) -> None:
        self._inner = inner
        self._num_layers = num_layers
        self._watch = watch
        self._done = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, scale: float) -> Tensor:
        """As `StepAttention.attend`."""
        out = self._inner.attend(q, k, v, layer_kv, scale)
        self._done += 1
        left = self._num_layers - self._done
        if self._done % self._watch.every == 0 or (left < self._watch.every and left & (left - 1) == 0):
            self._watch.tell(self._done)
        return out


class DeviceWatch:
    """Tells what a CUDA device has done rather than what was launched: one event a call, waited for on a thread.

    Not run on a GPU yet.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-watch")
        self._told: list[Future[None]] = []

    def behind(self, watch: LayerWatch) -> LayerWatch:
        """`watch`, told on this object's thread once the device is done with what was launched before."""
        return LayerWatch(watch.every, partial(self._tell_when_done, watch.tell))

    def finish(self) -> None:
        """The device is done with the step: returns when all of it has been told."""
        told, self._told = self._told, []
        for one in told:
            one.result()

    def _tell_when_done(self, tell: Callable[[int], None], num_layers: int) -> None:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()

        def wait_and_tell() -> None:
            event.synchronize()
            tell(num_layers)

        self._told.append(self._thread.submit(wait_and_tell))
