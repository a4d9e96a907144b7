"""Reports how far a running step has come, and waits for what it needs, layer by layer.

A model calls `attend` once a layer, in order, and the call stores that layer's K and V first; one that computes all
layers in one call takes `inner` and calls the rest itself. A step that nobody listens to, and that waits for nothing,
costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import c_int
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from halfmoon.engine.attention.attention_backend import AttentionRule, StepAttention
from halfmoon.engine.kv_memory.kv_watch import LayerWatch


class WatchedAttention:
    """Owns the count of a step's layers that have stored their K and V; attends like `inner`."""

    def __init__(self, inner: StepAttention, num_layers: int, watch: LayerWatch) -> None:
        self.inner = inner
        self._num_layers = num_layers
        self._watch = watch
        self._done = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, rule: AttentionRule) -> Tensor:
        """See `StepAttention.attend`."""
        out = self.inner.attend(q, k, v, layer_kv, rule)
        self._done += 1
        if self.reports(self._done):
            self.stored(self._done)
        return out

    def reports(self, num_layers: int) -> bool:
        """Whether the watch is notified once this many layers are stored."""
        left, every = self._num_layers - num_layers, self._watch.every
        return num_layers % every == 0 or (left < every and left & (left - 1) == 0)

    def stored(self, num_layers: int) -> None:
        """Notifies the watch that K and V of the first `num_layers` layers are in memory."""
        self._watch.notify(num_layers)


class Gate(Protocol):
    """What a step passes before each of its layers attends."""

    @property
    def asked(self) -> c_int | None:
        """While it is 0, layers need not pass; None: they must."""

    def wait(self, layer: int) -> None:
        """Returns when this layer may go on; raises what ends the step, such as LayerLate."""


class GatedAttention:
    """Owns the count of a step's layers that were begun; waits for each at a gate, then attends like `inner`."""

    def __init__(self, inner: StepAttention, gate: Gate) -> None:
        self.inner = inner
        self.gate = gate
        self._begun = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, rule: AttentionRule) -> Tensor:
        """See `StepAttention.attend`. Raises LayerLate."""
        if self.gate.asked is None or self.gate.asked.value:
            self.gate.wait(self._begun)
        self._begun += 1
        return self.inner.attend(q, k, v, layer_kv, rule)


class DeviceWatch:
    """Reports what a CUDA device has finished, not what was launched: one event per call, awaited on a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-watch")
        self._notifications: list[Future[None]] = []

    def behind(self, watch: LayerWatch) -> LayerWatch:
        """`watch`, notified on this object's thread once the device has finished what was launched before."""
        return LayerWatch(watch.every, partial(self._notify_when_done, watch.notify))

    def finish(self) -> None:
        """Returns when the device has finished what was launched and every notification was delivered."""
        torch.cuda.current_stream().synchronize()
        notifications, self._notifications = self._notifications, []
        for notification in notifications:
            notification.result()

    def _notify_when_done(self, notify: Callable[[int], None], num_layers: int) -> None:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()

        def wait_and_notify() -> None:
            event.synchronize()
            notify(num_layers)

        self._notifications.append(self._thread.submit(wait_and_notify))
