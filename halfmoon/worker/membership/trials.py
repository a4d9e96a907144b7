"""What a worker computes to measure itself: a few prompts and decode steps that fit into its engine. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from halfmoon.engine.request import EngineRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Trial:
    """Sequences computed together: their number, the tokens of each prompt and the decode steps.

    num_given: leading tokens of a prompt, in whole blocks, whose KV is there from the start, so that they cost no time.
    """

    num_sequences: int
    num_prompt_tokens: int
    num_steps: int = 0
    num_given: int = 0


class TrialRoom(NamedTuple):
    """What an engine can compute at once."""

    step_tokens: int
    context_tokens: int
    block_tokens: int
    num_blocks: int
    max_running: int
    can_be_given: bool = False  # KV of prompts that nobody computed


_MOST_STEPS = 8  # of a trial
_WARM_UP_TOKENS = 64
_MOST_GIVEN = 4096  # tokens: attention is then as much of a decode step as all else, on CPUs with a small model


def warm_up(room: TrialRoom) -> Trial:
    """Memory, threads and caches as the first trial needs them."""
    return Trial(1, min(_WARM_UP_TOKENS, _longest_step(room)), 2)


def trials(room: TrialRoom, role: str) -> Iterator[Trial]:
    """Yields the most informative trials first; leaves out trials that do not fit into the engine.

    The first one of every role decodes behind a short prompt, so that a slow worker, too, knows both of its models in
    time. One that only computes prompts may change its role. Prompts and batches of two sizes come next: without them
    a token, or an answer, could be free. What attention costs shows behind a long context, which is given if it can be.
    """
    step = _longest_step(room)
    short, few, many = Trial(1, max(step // 8, 1), _MOST_STEPS), Trial(4, 32, 8), Trial(16, 16, 4)
    long = _behind_given(room, short) if room.can_be_given else Trial(1, 2 * step, _MOST_STEPS)
    by_role = {
        "prefill": (short, Trial(1, step), few, long, Trial(1, step // 2), many),
        "decode": (Trial(1, min(64, step), _MOST_STEPS), few, Trial(1, step, 6), long, many),
        "both": (short, Trial(1, step, 6), few, long, many, Trial(1, step // 2)),
    }
    return (trial for trial in by_role[role] if fits(trial, room))


def _longest_step(room: TrialRoom) -> int:
    return min(room.step_tokens, room.context_tokens - _MOST_STEPS - 1)


def _behind_given(room: TrialRoom, trial: Trial) -> Trial:
    """The trial behind as much KV as there is room for, up to a bound.

    It is a power of two of tokens, so that workers with nearly the same room are of one kind.
    """
    num_own = trial.num_prompt_tokens + trial.num_steps + 1
    most = min(_MOST_GIVEN, room.context_tokens - num_own, room.num_blocks * room.block_tokens - num_own)
    num_given = (1 << most.bit_length() >> 1 if most > 0 else 0) // room.block_tokens * room.block_tokens
    return replace(trial, num_prompt_tokens=num_given + trial.num_prompt_tokens, num_given=num_given)


def trials_text(room: TrialRoom, role: str) -> str:
    """Describes the trials, for which a worker may have had more room at another start."""
    lengths = [trial.num_prompt_tokens for trial in trials(room, role)]
    return f"{len(lengths)} trials of at most {max(lengths, default=0)} tokens"


def fits(trial: Trial, room: TrialRoom) -> bool:
    """Whether an empty engine can compute a trial."""
    num_tokens = trial.num_prompt_tokens + trial.num_steps + 1
    num_blocks = trial.num_sequences * -(-num_tokens // room.block_tokens)
    has_room = num_tokens <= room.context_tokens and num_blocks <= room.num_blocks
    return has_room and trial.num_prompt_tokens > 0 and trial.num_sequences <= room.max_running


def trial_requests(trial: Trial, salt: str, vocab_size: int = 97) -> list[EngineRequest]:
    """salt: keeps the prompts of one trial from another's."""
    prompts = [
        tuple((7 + 13 * number + 31 * place) % vocab_size for place in range(trial.num_prompt_tokens))
        for number in range(trial.num_sequences)
    ]
    sampling = SamplingParams(max_tokens=trial.num_steps + 1, temperature=0.0, ignore_eos=True)
    return [
        EngineRequest(f"calibration-{salt}-{number}", prompt, sampling, tenant_salt=f"calibration {salt}".encode())
        for number, prompt in enumerate(prompts)
    ]
