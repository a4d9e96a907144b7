"""How a long prompt shares a prefill step with shorter ones: one rule for the engine, the simulator and the forecasts.

A variant of processor sharing: a short prompt waits for shorter ones and for a part of the long one, and this waits at
most for its own time, but for what more steps take.
"""

from __future__ import annotations

from collections.abc import Iterable

_LEAST_SHARE = 4  # part of a step that a long prompt gets at least, so that the time of a launch does not outweigh it


def is_shared(num_tokens: int, room: int, step_tokens: int) -> bool:
    """Whether a prompt of `num_tokens` leaves part of a step to shorter ones behind it.

    So if it has more than the `room` left in the step, or more than half of a whole step's tokens.
    """
    return num_tokens > room or 2 * num_tokens > step_tokens


def shares(num_tokens: int, shorter: Iterable[int], room: int, step_tokens: int) -> tuple[int, list[int]]:
    """The tokens that a prompt of `num_tokens` gets of `room`, and those of the first of the `shorter` ones.

    `shorter` ascends. Those that fit into half of `room` together run whole; if not even the first does, a part of it.
    The long prompt gets as many tokens as they do, or a quarter of a whole step, and the step ends with that: they
    would wait for what more it computed. Without shorter ones it gets all of `room` that it needs.
    """
    result: list[int] = []
    most = left = room // 2
    for other in shorter:
        if other > left:
            if not result and most:
                result.append(left)
                left = 0
            break
        result.append(other)
        left -= other
    if not result:
        return min(num_tokens, room), result
    others = most - left
    return min(num_tokens, max(others, step_tokens // _LEAST_SHARE), room - others), result
