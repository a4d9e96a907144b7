"""What the engine orders of the connector, and what the connector reports. No torch, no vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KVOrder:
    """What to do with one request's KV, sent with it as `kv_transfer_params`. Blocks are those of the arena.

    Tokens from `load_from` to `load_tokens` are loaded before the first step, if vLLM has those before them; those from
    `save_from` on are saved, if it is given.
    """

    request_id: str
    use: int  # number of this use of the blocks; each block's stamp has to show it
    blocks: tuple[int, ...]
    load_tokens: int = 0
    load_from: int = 0
    save_from: int | None = None

    def params(self) -> dict[str, Any]:
        """The order as `kv_transfer_params`."""
        return asdict(self)

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> KVOrder | None:
        """The order in a request's `kv_transfer_params`; None without one."""
        return None if not params else cls(**{**params, "blocks": tuple(params["blocks"])})


@dataclass(frozen=True, slots=True)
class Saved:
    """A computing half has `num_layers` layers of the tokens below `end`, and all layers of those below `num_tokens`.

    Counted from its own first layer.
    """

    request_id: str
    num_tokens: int
    end: int
    num_layers: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """No step touches the request's blocks any more."""

    request_id: str
    use: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Stepped:
    """One step of vLLM's scheduler. `prefill_tokens`: by request id, with how many came before them."""

    began_s: float  # time.monotonic(), which all processes of a host share
    ended_s: float
    prefill_tokens: Mapping[str, tuple[int, int]]  # request id: (tokens computed before, tokens of this step)
    num_decode_seqs: int
    decode_context_tokens: int
    num_free_blocks: int
    num_preempted: int = 0


Report = Saved | Ended | Stepped
_KINDS: Mapping[str, type[Saved] | type[Ended] | type[Stepped]] = {
    kind.__name__: kind for kind in (Saved, Ended, Stepped)
}


def encode_report(report: Report) -> bytes:
    """One line."""
    return json.dumps([type(report).__name__, asdict(report)], separators=(",", ":")).encode() + b"\n"


def decode_report(line: bytes) -> Report:
    """The report of one line."""
    kind, fields = json.loads(line)
    return _KINDS[kind](**fields)
