"""What is guessed, and when guessing stops."""

from __future__ import annotations

import random

from halfmoon.engine.scheduling.speculation import MOST_DRAFTS, Speculation

PASSAGE = list(range(100, 160))


def test_what_followed_the_last_three_tokens_is_guessed() -> None:
    speculation = Speculation()
    assert speculation.drafts([*PASSAGE, 7, 8, 110, 111, 112], 2, 1) == [113, 114]
    assert speculation.drafts([*PASSAGE, 7, 8, 110, 111, 112, 113], 1, 1) == [114]
    assert speculation.drafts([*PASSAGE, 7, 8, 110, 111, 112, 113, 5], 9, 1) == []
    assert Speculation().drafts([1, 2], 9, 1) == []


def test_the_newest_place_counts_and_a_loop_is_guessed() -> None:
    assert Speculation().drafts([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3], 1, 1) == [5]
    assert Speculation().drafts([6, 6, 6, 6], 1, 1) == [6]


def test_right_guesses_make_longer_ones_and_wrong_ones_none() -> None:
    right, wrong = Speculation(), Speculation()
    text = [*PASSAGE, 1, 100, 101, 102]
    lengths = []
    for _ in range(20):
        lengths.append(len(right.drafts(text, 99, 1)))
        right.note(lengths[-1], lengths[-1])
        if drafts := wrong.drafts(text, 99, 1):
            wrong.note(len(drafts), 0)
    assert lengths == sorted(lengths)
    assert lengths[-1] == MOST_DRAFTS
    assert wrong.drafts(text, 99, 1) == []


def test_in_larger_batches_guesses_must_be_right_more_often() -> None:
    text = [*PASSAGE, 1, 100, 101, 102]
    assert len(Speculation().drafts(text, 99, 1)) > len(Speculation().drafts(text, 99, 6))
    assert Speculation().drafts(text, 99, 64) == []


def test_text_that_never_goes_on_as_before_is_hardly_guessed() -> None:
    rng, speculation, num_drafts = random.Random(1), Speculation(), 0
    text = [rng.randrange(12) for _ in range(4000)]  # most three tokens occurred before, and say nothing
    for end in range(2000, 3900):
        drafts = speculation.drafts(text[:end], 9, 1)
        if drafts:
            wrong = (at for at, draft in enumerate(drafts) if draft != text[end + at])
            speculation.note(len(drafts), next(wrong, len(drafts)))
            num_drafts += len(drafts)
    assert 0 < num_drafts < 0.1 * 1900
