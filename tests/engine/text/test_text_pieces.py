"""A text's tokens are those of its pieces, whatever it is; and it never has fewer than it seems to."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as Steps

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.text.piece_tokens import PieceTokens
from halfmoon.engine.text.prefix_tokenizer import Around, PrefixTokenizer
from halfmoon.engine.text.text_pieces import PATTERNS, PIECE_CHARS, can_be_cut, least_tokens, pieces_of
from halfmoon.engine.text.tokenizer import Tokenizer

MERGES = [
    ("Ġ", "a"),
    ("a", "b"),
    ("Ġ", "Ġ"),
    ("ĠĠ", "ĠĠ"),
    ("ab", "c"),
    ("Ċ", "Ċ"),
    ("Ġ", "Ċ"),
    ("Ċ", "Ġ"),
    ("Ġa", "b"),
]
MERGES += [("'", "s"), ("b", "Ġ"), ("!", "Ġ"), ("ĠĊ", "Ċ"), ("1", "2"), ("12", "3"), ("e", "Ì"), ("eÌ", "Ģ")]
SPLITS: list[PreTokenizer] = [
    ByteLevel(add_prefix_space=False),
    Steps([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    *(
        Steps([Split(Regex(one), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
        for one in sorted(PATTERNS)
    ),
]


def fast(pre_tokenizer: PreTokenizer, **options: Any) -> FastTokenizer:
    letters = set(ByteLevel.alphabet()) - set("ĄñÀ")  # some vocabularies lack a few bytes
    vocab = {one: number for number, one in enumerate([*sorted(letters), *dict.fromkeys(map("".join, MERGES))])}
    made = FastTokenizer(BPE(vocab=vocab, merges=MERGES, **options))
    made.pre_tokenizer = pre_tokenizer
    made.normalizer = normalizers.NFC()
    made.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    return made


def described(tokenizer: FastTokenizer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    return found


def ids(tokenizer: FastTokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


CRUMBS = [
    "a b",
    "ab",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "'s",
    "'ll",
    "!",
    "12",
    "3",
    "é",
    "e\u0300",
    "\u0300",
    "世界",
    "\xa0",
]
CRUMBS += [
    "\x04",
    "\U00040000",
    "\u3000",
    "<|end|>",
    "<|",
    "S'S",
    "ſ",
    "ABC",
    ".\n",
    " !",
    "🌍",
    "x <|end|> y",
    "a'b c",
]
texts = st.lists(st.sampled_from(CRUMBS) | st.text(max_size=4), max_size=40).map("".join)


@pytest.mark.parametrize("pre_tokenizer", SPLITS, ids=["GPT-2", "digits", "Llama 3", "Qwen"])
@settings(max_examples=300)
@given(text=texts, begin=st.integers(0, 30))
@example(text="a\n  b \n c", begin=0)
def test_tokens_are_those_of_the_pieces(pre_tokenizer: PreTokenizer, text: str, begin: int) -> None:
    tokenizer = fast(pre_tokenizer)
    cuts = sorted({0, *(len(text) - len(rest) for rest in _rests(text)), len(text)})
    pieces = [text[one:two] for one, two in itertools.pairwise(cuts)]
    whole = ids(tokenizer, text)
    assert [one for piece in pieces for one in ids(tokenizer, piece)] == whole
    assert least_tokens(text) <= len(whole)
    assert can_be_cut(described(tokenizer))


def _rests(text: str) -> list[str]:
    """What follows each of all cuts, not only those that are some way apart."""
    padded = "x" * PIECE_CHARS
    found = []
    for at in range(len(text)):
        _, *others = pieces_of(padded[: PIECE_CHARS - at] + text)
        if others:
            found.append("".join(others))
    return found


@given(text=texts.map(lambda one: 9 * one))
def test_pieces_are_the_text_and_long_enough(text: str) -> None:
    pieces = list(pieces_of(text))
    assert "".join(pieces) == text
    assert all(len(piece) >= PIECE_CHARS for piece in pieces[:-1])


def test_few_tokens_are_hardly_underestimated_for_words() -> None:
    assert least_tokens("one two  three\tfour!\n five") == 2
    assert least_tokens("") == 0


@pytest.mark.parametrize(
    "tokenizer",
    [
        fast(Metaspace()),
        fast(ByteLevel(add_prefix_space=True)),
        fast(ByteLevel(use_regex=False, add_prefix_space=False)),
        fast(Steps([Split(Regex(r"\s+"), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])),
        fast(SPLITS[0], dropout=0.1),
        FastTokenizer(BPE(vocab={"a": 0}, merges=[])),
    ],
    ids=str,
)
def test_others_are_not_cut(tokenizer: FastTokenizer) -> None:
    assert not can_be_cut(described(tokenizer))


@pytest.mark.parametrize("token", [AddedToken("a b"), AddedToken("<x>", rstrip=True), AddedToken("<x>", lstrip=True)])
def test_tokens_that_take_spaces_along_forbid_cuts(token: AddedToken) -> None:
    tokenizer = fast(SPLITS[0])
    tokenizer.add_special_tokens([token])
    assert not can_be_cut(described(tokenizer))


def test_a_normalizer_that_is_not_known_forbids_cuts() -> None:
    tokenizer = fast(SPLITS[0])
    tokenizer.normalizer = normalizers.Lowercase()
    assert not can_be_cut(described(tokenizer))


class CountingPieces(PieceTokens):
    """One token a character."""

    def __init__(self, max_pieces: int = 100) -> None:
        self.asked: list[str] = []
        super().__init__(self._ids, max_pieces)

    def _ids(self, pieces: list[str]) -> list[Sequence[int]]:
        self.asked += pieces
        return [list(map(ord, piece)) for piece in pieces]


def long_text(name: str, num_pieces: int) -> str:
    return " ".join(f"{name}{number} {'word' * 80}" for number in range(num_pieces))


def test_what_came_before_is_remembered() -> None:
    pieces = CountingPieces()
    first, second = long_text("one", 4), long_text("two", 3)
    for text in (first, f"{first} {second}", f"{first} {second}"):
        assert pieces.of_text(text) == list(map(ord, text))
    assert len(pieces.asked) == len(set(pieces.asked)) == 4 + 3
    forgetful = CountingPieces(max_pieces=2)
    for _ in range(2):
        forgetful.of_text(first + " and " + second)
    assert len(forgetful.asked) > 7


def test_what_came_with_another_salt_is_not_known() -> None:
    pieces, text = CountingPieces(), long_text("one", 3)
    for salt in (b"", b"a", b"b"):
        assert pieces.of_text(text, salt) == list(map(ord, text))
    assert [pieces.asked.count(one) for one in set(pieces.asked)] == [3, 3, 3]
    beginning = PrefixTokenizer(text, pieces, salt=b"a")
    beginning.read_on(1)
    assert beginning.is_whole  # what is remembered does not count
    PrefixTokenizer(text, pieces, salt=b"c").read_on(1)
    assert len(pieces.asked) == 3 * 3 + 1


def test_a_beginning_is_read_as_far_as_wanted_and_what_is_remembered_comes_with_it() -> None:
    pieces = CountingPieces()
    known, text = long_text("one", 4), long_text("one", 4) + " " + long_text("two", 3)
    beginning = PrefixTokenizer(text, pieces, Around((7,), (8, 9)))
    beginning.read_on(1)
    first = next(pieces_of(text))
    assert list(beginning.token_ids) == [7, *map(ord, first)]
    assert beginning.least_tokens() == 1 + len(first) + least_tokens(text[len(first) + 1 :])
    pieces.of_text(known + " x")
    pieces.asked.clear()
    beginning.read_on(1)
    assert len(pieces.asked) == 1
    assert not beginning.is_whole
    beginning.read_on(10_000)
    beginning.read_on(1)
    assert beginning.is_whole
    assert list(beginning.token_ids) == [7, *map(ord, text), 8, 9]
    endless = PrefixTokenizer(known + " " + 5_000 * "x" + " and so on", pieces)
    endless.read_on(10_000)
    assert (list(endless.token_ids), endless.is_whole) == (list(map(ord, known)), False)
    unreadable = PrefixTokenizer(text, None)
    unreadable.read_on(5)
    assert (list(unreadable.token_ids), unreadable.is_whole, unreadable.least_tokens()) == ([], False, 1)


@pytest.fixture(scope="module")
def tokenizer(demo: Checkpoint) -> Tokenizer:
    return Tokenizer(demo)


@settings(max_examples=100)
@given(text=st.lists(texts, min_size=1, max_size=5).map(lambda some: " and so on ".join(9 * some)))
def test_the_demo_models_tokens_are_those_of_the_library(tokenizer: Tokenizer, text: str) -> None:
    expected = list(tokenizer._fast.encode(text).ids)
    assert tokenizer.encode(text) == expected
    beginning = tokenizer.begin(text)
    assert beginning.least_tokens() <= len(expected)
    for _ in expected:
        beginning.read_on(50)
        assert list(beginning.token_ids) == expected[: len(beginning.token_ids)]
        assert beginning.least_tokens() <= len(expected)
    assert list(beginning.token_ids) == expected


def test_tokens_around_a_text_are_around_it_once(tokenizer: Tokenizer) -> None:
    kept = tokenizer._fast.post_processor
    tokenizer._fast.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    try:
        around = tokenizer._found_around()
    finally:
        tokenizer._fast.post_processor = kept
    assert around == Around((1,), (2,))
