"""Messages between rank 0 and its followers through pipes: plain values, pickled, between our own processes.

Each follower has two pipes. *steps*: `Setup`, then `Step` after `Step` one way, `Hello`, `Ready` or `Failed` the other.
*copies*: `CopyKV` of four kinds one way, bytes the other, concurrently with the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon.engine.checkpoint.checkpoint import Quantization
from halfmoon.engine.chunk import Chunk
from halfmoon.engine.config import EngineConfig
from halfmoon.kv.kv_layout import KVSlice, Shard
from halfmoon.kv.staged_shards import Ticket


@dataclass(frozen=True, slots=True)
class Setup:
    """Configuration of a new follower. `config` has dtype and num_blocks resolved."""

    rank: int
    rank_here: int  # among those of its host
    num_ranks_here: int
    model_path: str  # on rank 0's host
    fingerprint: str
    quantization: Quantization
    config: EngineConfig
    rendezvous: tuple[str, int]  # host and port


@dataclass(frozen=True, slots=True)
class Hello:
    """The process runs, has found its model, and waits for the others."""


@dataclass(frozen=True, slots=True)
class Connect:
    """All processes run: meet, then load."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The weights are loaded."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The follower ends. `error_class` names a class of `halfmoon.errors`, if the error is one."""

    error_class: str
    message: str


@dataclass(frozen=True, slots=True)
class Step:
    """One batch, without sampling parameters: rank 0 draws."""

    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class CopyKV:
    """KV of a sequence; `part` is in the follower's own layers, counted from its first one.

    It runs once `after_steps` steps are computed: those steps may still use the blocks' previous content.
    """

    after_steps: int
    blocks: Sequence[int]
    part: KVSlice


@dataclass(frozen=True, slots=True)
class ReadKV(CopyKV):
    """A read, answered with the bytes of the follower's heads."""


@dataclass(frozen=True, slots=True)
class WriteKV(CopyKV):
    """A write, followed by the bytes of the follower's heads; answered with no bytes when they are in place."""


@dataclass(frozen=True, slots=True)
class StageKV(CopyKV):
    """A read whose bytes stay on the follower's host, as the part `place` of a ticket; answered with no bytes."""

    ticket: Ticket
    place: Shard


@dataclass(frozen=True, slots=True)
class WriteStagedKV(CopyKV):
    """A write of what the follower's host keeps for the ticket; answered with no bytes, or why it cannot be."""

    ticket: Ticket
