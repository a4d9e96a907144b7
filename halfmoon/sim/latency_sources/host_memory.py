"""Steps of a worker with KV or weights in host memory, which come while it computes (engine: `offload/`)."""

from __future__ import annotations

import math
from typing import NamedTuple

_PARALLEL = 1e-9  # lines whose slopes differ by less, relative to the steeper one, do not cross


class Cycle(NamedTuple):
    """Seconds of a decode step of one batch: `base_s + slope_s * context_tokens`."""

    base_s: float
    slope_s: float

    def plus(self, factor: float, other: Cycle) -> Cycle:
        """This line, and `factor` times the other."""
        return Cycle(self.base_s + factor * other.base_s, self.slope_s + factor * other.slope_s)


_ZERO = Cycle(0.0, 0.0)


class Recomputed(NamedTuple):
    """Tokens whose K and V are computed from what a layer takes in, which is fetched instead (KVPR)."""

    fetch_s: float  # of one token, in all layers
    compute_s: float


class HostMemory(NamedTuple):
    """KV beyond the device's memory, or weights of some layers, lie on the host; each step loads them layer by layer.

    A layer is loaded while the one before it computes, so that a step takes the longer of loading and computing, and a
    layer's share of the shorter of computing and loading KV. Weights are fetched across steps, so that they may hide
    wholly. Of KV on the host, as much is recomputed as makes both equally long.
    """

    device_tokens: float  # of the sequences of a step; what exceeds them is loaded
    load_s: float  # of one token, in all layers
    num_layers: int
    weights_s: float = 0.0  # of all weights on the host, in each step
    recomputed: Recomputed | None = None  # None: all of it is loaded

    def step_s(self, computed_s: float, num_tokens: float) -> float:
        """Seconds of a step that sees `num_tokens` and computes for `computed_s`."""
        line, _ = self.piece(Cycle(computed_s, 0.0), num_tokens)
        return line.base_s + line.slope_s * num_tokens

    def piece(self, computed: Cycle, context_tokens: float) -> tuple[Cycle, float]:
        """The decode step of a batch that computes for `computed`, and the context up to which this holds."""
        bends = _Bends(context_tokens)
        on_host = bends.upper(_ZERO, Cycle(-self.device_tokens, 1.0))
        loaded = _ZERO.plus(self.load_s, on_host)
        link = loaded.plus(1.0, Cycle(self.weights_s, 0.0))
        if self.recomputed is not None:
            way = self.recomputed
            balance = 1 / (self.load_s - way.fetch_s + way.compute_s)
            # tokens until both take equally long, at most all that are on the host
            again = bends.upper(_ZERO, _ZERO.plus(balance, link.plus(-1.0, computed)))
            again = bends.lower(again, on_host)
            computed = computed.plus(way.compute_s, again)
            loaded = loaded.plus(way.fetch_s - self.load_s, again)
            link = link.plus(way.fetch_s - self.load_s, again)
        longer, shorter = bends.upper(computed, link), bends.lower(computed, loaded)
        return longer.plus(1 / self.num_layers, shorter), bends.first

    def scaled(self, factor: float) -> HostMemory:
        """The memory of a worker that is `factor` times as fast."""
        way = self.recomputed
        return self._replace(
            load_s=self.load_s / factor,
            weights_s=self.weights_s / factor,
            recomputed=way and Recomputed(way.fetch_s / factor, way.compute_s / factor),
        )


class _Bends:
    """Owns the first context after `context_tokens` at which a chosen line changes."""

    def __init__(self, context_tokens: float) -> None:
        self._context_tokens = context_tokens
        self.first = math.inf

    def upper(self, one: Cycle, other: Cycle) -> Cycle:
        """The upper line here; at a crossing, that of the tokens after it."""
        return self._chosen(one, other, upper=True)

    def lower(self, one: Cycle, other: Cycle) -> Cycle:
        """The lower line here."""
        return self._chosen(one, other, upper=False)

    def _chosen(self, one: Cycle, other: Cycle, *, upper: bool) -> Cycle:
        flat, steep = sorted((one, other), key=lambda line: line.slope_s)
        if steep.slope_s - flat.slope_s <= _PARALLEL * max(abs(steep.slope_s), abs(flat.slope_s)):
            return (max if upper else min)(one, other, key=lambda line: line.base_s)
        crossing = (flat.base_s - steep.base_s) / (steep.slope_s - flat.slope_s)
        if self._context_tokens < crossing:
            self.first = min(self.first, crossing)
            return flat if upper else steep
        return steep if upper else flat
