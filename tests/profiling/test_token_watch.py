"""Steps seen from a token stream: single ones, several in a message, those of others, the end."""

from __future__ import annotations

import pytest

from halfmoon.errors import HalfmoonError
from halfmoon.pb import decode_pb2, types_pb2
from halfmoon.profiling.token_watch import SeenStep, TokenWatch


def message(*tokens: tuple[str, int], finish: int = types_pb2.NOT_FINISHED) -> decode_pb2.StepTokens:
    return decode_pb2.StepTokens(
        tokens=[types_pb2.Token(request_id=name, position=at, finish_reason=finish) for name, at in tokens]  # type: ignore[arg-type]
    )


async def test_a_step_is_the_time_between_two_messages_of_the_whole_batch() -> None:
    watch = TokenWatch(prompt_tokens=100)
    watch.feed(message(("a", 1)), 1.0)
    watch.begin(["a", "b"])
    watch.feed(message(("a", 2), ("b", 1)), 2.0)  # the first of both
    watch.feed(message(("a", 3), ("b", 2)), 2.5)
    assert list(await watch.steps(1)) == [SeenStep(205, 0.5)]
    watch.feed(message(("a", 4), ("b", 3), ("a", 5), ("b", 4)), 3.5)  # two steps: the reader was late
    watch.feed(message(("a", 6)), 4.0)
    assert list(await watch.steps(3)) == [SeenStep(205, 0.5), SeenStep(209, 0.5), SeenStep(207, 0.5)]


async def test_a_batch_that_ends_is_no_reason_to_wait_for_ever() -> None:
    watch = TokenWatch(prompt_tokens=1)
    watch.begin(["a"])
    watch.feed(message(("a", 1), finish=types_pb2.LENGTH), 1.0)
    with pytest.raises(HalfmoonError, match="ended before"):
        await watch.steps(1)


def test_a_request_that_the_worker_gave_up_ends_the_profile() -> None:
    with pytest.raises(HalfmoonError, match="error"):
        TokenWatch(1).feed(message(("a", 1), finish=types_pb2.ERROR), 1.0)
