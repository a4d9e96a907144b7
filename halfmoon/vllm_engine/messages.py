"""What the engine orders of the connector, and what the connector reports. No torch, no vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from halfmoon.engine.request import Constraint, SamplingParams


@dataclass(frozen=True, slots=True)
class KVOrder:
    """What to do with one request's KV, sent with it as `kv_transfer_params`. Blocks are those of the arena.

    Tokens from `load_from` to `load_tokens` are loaded before the first step, if vLLM has those before them. The first
    `save_tokens` are saved, after the first token unless they are watched. Of a request that `is_kept`, the whole
    blocks behind both are saved after its end.
    """

    request_id: str
    use: int  # number of this use of the blocks; each block's stamp has to show it
    blocks: tuple[int, ...]
    load_tokens: int = 0
    load_from: int = 0
    save_tokens: int = 0
    is_watched: bool = False  # somebody reads each layer as soon as it is saved
    is_kept: bool = False

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
class Finished:
    """A request that is to be kept has ended. If it has tokens, vLLM keeps their pages until `Keep` comes.

    They are whole blocks, from the request's first token on. The last of them are of the `answer`, which the report has
    since it comes before the tokens themselves.
    """

    request_id: str
    use: int
    num_tokens: int
    answer: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Keep:
    """The worker's answer to `Finished`: where the request's blocks from `first` on go; nothing is kept without any."""

    finished_use: int  # that `Finished` named
    use: int
    first: int
    blocks: tuple[int, ...]


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


@dataclass(frozen=True, slots=True)
class NotDrawn:
    """Our sampler drew no token; the one that comes means nothing."""

    request_id: str
    is_constraint: bool  # whether the required form allows none


Report = Saved | Ended | Finished | Stepped | NotDrawn
_KINDS: Mapping[str, Callable[..., Report]] = {
    kind.__name__: kind for kind in (Saved, Ended, Finished, Stepped, NotDrawn)
}


@dataclass(frozen=True, slots=True)
class OwnDraw:
    """That our sampler draws a request's tokens inside vLLM. Its prompt ends with `num_before` tokens of the answer."""

    NAME: ClassVar = "halfmoon_draw"  # among vLLM's `extra_args`

    request_id: str
    sampling: SamplingParams
    num_before: int

    def params(self) -> dict[str, Any]:
        """Plain values."""
        sampling = {field.name: getattr(self.sampling, field.name) for field in fields(self.sampling)}
        sampling["logit_bias"] = list(self.sampling.logit_bias.items())
        if self.sampling.constraint is not None:
            sampling["constraint"] = asdict(self.sampling.constraint)
        return {"request_id": self.request_id, "sampling": sampling, "num_before": self.num_before}

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> OwnDraw | None:
        """The inverse of `params`; None without any."""
        if not params:
            return None
        sampling = dict(params["sampling"])
        sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"]}
        for name in ("stop_token_ids", "allowed_token_ids"):
            sampling[name] = tuple(sampling[name])
        sampling["bad_words"] = tuple(map(tuple, sampling["bad_words"]))
        if sampling["constraint"] is not None:
            sampling["constraint"] = Constraint(**sampling["constraint"])
        return cls(params["request_id"], SamplingParams(**sampling), params["num_before"])


def encode_report(report: Report) -> bytes:
    """One line."""
    return json.dumps([type(report).__name__, asdict(report)], separators=(",", ":")).encode() + b"\n"


def decode_report(line: bytes) -> Report:
    """The report of one line."""
    kind, fields = json.loads(line)
    return _KINDS[kind](**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def encode_keep(keep: Keep) -> bytes:
    """One line."""
    return json.dumps(asdict(keep), separators=(",", ":")).encode() + b"\n"


def decode_keep(line: bytes) -> Keep:
    """The inverse of `encode_keep`."""
    fields = json.loads(line)
    return Keep(**{**fields, "blocks": tuple(fields["blocks"])})
