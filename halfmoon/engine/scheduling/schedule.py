"""What one step runs: tokens of sequences, within limits. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from halfmoon.engine.scheduling.layer_gate import LayerGate
from halfmoon.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step may hold. `chunk_tokens` bounds prefill next to decodes where `Scheduler.chunk_rule` is unknown."""

    max_batch_tokens: int = 2048
    chunk_tokens: int = 512
    max_running: int = 64
    speculates: bool = False  # decodes also run guessed tokens (`speculation.py`)
    window_tokens: int | None = None  # no layer lets a token see further back, itself included; None: some does


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """`num_tokens` tokens of `sequence`, from `start` on, run in this step.

    The `num_arriving` tokens between its `num_computed` and `start` arrive layer by layer while the step runs. The last
    ones may be `drafts`: guesses that are not among the sequence's tokens yet.
    """

    sequence: Sequence
    num_tokens: int
    num_arriving: int = 0
    drafts: tuple[int, ...] = ()
    # Counted when it is scheduled:
    start: int = field(init=False)  # position of the first token that runs
    num_drawn: int = field(init=False)  # tokens that are drawn: the next one, and what would follow each guess
    num_logits: int = field(init=False)  # how many of its last tokens the step needs logits of

    def __post_init__(self) -> None:
        sequence, num_drafts = self.sequence, len(self.drafts)
        self.start = sequence.num_computed + self.num_arriving
        is_whole = self.start + self.num_tokens - num_drafts == len(sequence.token_ids)
        self.num_drawn = 1 + num_drafts if is_whole else 0
        self.num_logits = self.num_tokens if sequence.needs_all_outputs else self.num_drawn

    @property
    def samples(self) -> bool:
        """Whether the step ends with this sequence's newest token, so that the next one is drawn."""
        return self.num_drawn > 0

    def num_seen(self, block_tokens: int) -> int:
        """Tokens that its last one attends to, itself included."""
        return self.start + self.num_tokens - self.sequence.num_unseen(block_tokens)

    def arriving_blocks(self, block_tokens: int) -> range:
        """The blocks that arrive."""
        return range(self.sequence.num_computed // block_tokens, self.start // block_tokens)

    @property
    def gate(self) -> LayerGate | None:
        """Where the step waits for the layers that arrive."""
        restore = self.sequence.restore
        return restore.gate if self.num_arriving and restore is not None else None


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's work, decodes first."""

    scheduled: tuple[ScheduledSequence, ...]
    num_decode_seqs: int
    num_preempted: int

    @property
    def num_tokens(self) -> int:
        """All tokens that run."""
        return sum(item.num_tokens for item in self.scheduled)

    @property
    def can_nest(self) -> bool:
        """Whether prompts may run in the middle of it: it is of prompts alone, none with a single token left, or with
        KV on its way.
        """
        is_plain = all(item.sequence.restore is None for item in self.scheduled)
        return bool(self.scheduled) and not self.num_decode_seqs and is_plain
