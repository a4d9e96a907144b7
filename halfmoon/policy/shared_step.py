"""How a long prompt shares a prefill step with shorter ones: one rule for the engine, the simulator and the forecasts.

A variant of processor sharing. A shorter prompt has fewer tokens to run now, without what is cached; it waits for even
shorter ones and for about as much of the long one as these and itself have. The first long prompt waits at most for its
own time and a step, but for what launching more steps takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import NamedTuple, Protocol, TypeVar

MOST_BEHIND = 64  # prompts behind a long one that are looked at for shorter ones, which takes time for each
_LEAST_SHARE = 0.25  # of a whole step, for a long prompt: else launches might take longer than its tokens

Prompt = TypeVar("Prompt")


class Queued(Protocol):
    """A prompt that waits for room, or that runs."""

    @property
    def state(self) -> str:
        """It is "waiting" for room, or has some."""


QueuedPrompt = TypeVar("QueuedPrompt", bound=Queued)


class ToAdmit(NamedTuple):
    """What a waiting prompt needs in order to be computed."""

    num_cached: int  # leading tokens that the prefix cache has
    num_blocks: int  # besides those of these that stay in use anyway


def is_long(num_tokens: int, room: int, step_tokens: int, *, is_awaited: bool = False) -> bool:
    """Whether a prompt with `num_tokens` to run leaves part of a step to shorter ones behind it.

    It does if it has more than the `room` left in the step, or more than half of a whole step's tokens. `is_awaited`:
    other workers wait for it, so it runs whole if it fits.
    """
    return num_tokens > room or (2 * num_tokens > step_tokens and not is_awaited)


def shorter_ones(
    num_tokens: int,
    later: Iterable[QueuedPrompt],
    num_blocks: int,
    num_places: int,
    to_admit: Callable[[QueuedPrompt], ToAdmit | None],
    tokens_of: Callable[[QueuedPrompt, int], int],
) -> list[tuple[int, QueuedPrompt]]:
    """The `later` prompts with fewer than `num_tokens` to run now, and before each how many; the fewest first.

    After the first that waits and has no room (`num_blocks` and `num_places` are free) or no turn, none that waits is
    among them. `to_admit`: None for one that has no turn. `tokens_of` a prompt, behind so many cached ones, are 0 if it
    may not share.
    """
    result: list[tuple[int, QueuedPrompt]] = []
    num_looks = 0
    for other in later:
        num_cached = 0
        if other.state == "waiting":
            needs = to_admit(other) if num_places > 0 else None
            if needs is None or needs.num_blocks > num_blocks:
                num_places = 0
                continue
            num_cached = needs.num_cached
            num_places, num_blocks = num_places - 1, num_blocks - needs.num_blocks
        num_looks += 1
        if num_looks > MOST_BEHIND:
            break
        if 0 < (num_others := tokens_of(other, num_cached)) < num_tokens:
            result.append((num_others, other))
    return sorted(result, key=itemgetter(0))


def share_out(
    num_tokens: int, shorter: Iterable[Prompt], tokens_of: Callable[[Prompt], int], room: int, step_tokens: int
) -> tuple[int, list[tuple[Prompt, int]]]:
    """The tokens that a long prompt gets of `room`, and which of the `shorter` ones run beside it, with theirs.

    Their `tokens_of` ascend. Those that fit into half of `room` together run whole; if not even the first does, a part
    of it. The long prompt gets as many tokens as they have together, but at least a quarter of a whole step, as far as
    they leave it room and it has them. With that the step ends: they would wait for what more it ran. Without shorter
    ones it gets all of `room` that it needs.
    """
    result: list[tuple[Prompt, int]] = []
    half = left = room // 2
    for other in shorter:
        num_others = tokens_of(other)
        if num_others > left:
            if not result and half:
                result.append((other, half))
                left = 0
            break
        result.append((other, num_others))
        left -= num_others
    if not result:
        return min(num_tokens, room), result
    num_shorter = half - left
    return min(num_tokens, max(num_shorter, int(_LEAST_SHARE * step_tokens)), room - num_shorter), result
