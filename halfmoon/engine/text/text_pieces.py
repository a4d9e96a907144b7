"""Where a text can be cut so that its tokens are the concatenation of its pieces' tokens; and how few it can have.

This holds for tokenizers that split a text by a pattern and merge only within the parts, if a space can only begin a
part, as in those of GPT-2, Llama 3 and Qwen: no part extends over a space that follows a non-space. Between a word and
a space with another word, neither side depends on the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

PIECE_CHARS = 320  # at least; about a block of tokens
_CUT = re.compile(r"[A-Za-z](?= [A-Za-z])")
_VISIBLE = {chr(code) for code in range(ord("!"), ord("~") + 1)}
_BEFORE_CUT = re.compile(r"[!-~] ")
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {  # as they appear in tokenizer.json
    _WORDS + r"\p{N}{1,3}" + _OTHERS,  # Llama 3
    _WORDS + r"\p{N}" + _OTHERS,  # Qwen 2, 2.5 and 3
}


def pieces_of(text: str, longest: int | None = None) -> Iterator[str]:
    """Cuts a text: a piece ends at the first cut after `PIECE_CHARS`, whatever follows.

    Stops before the first piece that is longer than `longest`.
    """
    begin, end = 0, len(text)
    reach = end if longest is None else longest
    while (cut := _CUT.search(text, begin + PIECE_CHARS - 1, min(begin + reach, end))) is not None:
        yield text[begin : cut.end()]
        begin = cut.end()
    if 0 < end - begin <= reach:
        yield text[begin:]


def least_tokens(text: str) -> int:
    """Lower bound on a text's tokens: a word that ends at a space is at least one."""
    codes = np.frombuffer(text.encode(errors="surrogatepass"), dtype=np.uint8)
    ends = (codes[1:] == ord(" ")) & (codes[:-1] - np.uint8(ord("!")) <= ord("~") - ord("!"))
    return int(np.count_nonzero(ends))


def can_be_cut(described: Mapping[str, Any]) -> bool:
    """Whether this holds for the tokenizer that a tokenizer.json describes; False for an unknown one."""
    model, normalizer = described["model"], described["normalizer"]
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and model["vocab"].keys() >= _VISIBLE  # other characters may have no token at all
        and (normalizer is None or normalizer["type"] == "NFC")
        and described["truncation"] is None
        and described["padding"] is None
        and _splits_at_spaces(described["pre_tokenizer"])
        and not any(map(_may_span_a_cut, described["added_tokens"]))
    )


def _splits_at_spaces(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    steps = _steps(pre_tokenizer)
    is_bytewise = any(step["type"] == "ByteLevel" for step in steps)
    return is_bytewise and all(map(_is_known, steps)) and any(map(_splits, steps))


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return ()
    steps: Sequence[Mapping[str, Any]] = pre_tokenizer.get("pretokenizers", (pre_tokenizer,))
    return steps


def _is_known(step: Mapping[str, Any]) -> bool:
    match step["type"]:
        case "ByteLevel":
            return not step["add_prefix_space"]
        case "Split":
            return step["pattern"].get("Regex") in PATTERNS and step["behavior"] == "Isolated" and not step["invert"]
        case kind:
            return bool(kind == "Digits")


def _splits(step: Mapping[str, Any]) -> bool:
    return step["type"] == "Split" or bool(step.get("use_regex"))


def _may_span_a_cut(token: Mapping[str, Any]) -> bool:
    takes_more = token["single_word"] or token["lstrip"] or token["rstrip"]
    return bool(takes_more or _BEFORE_CUT.search(token["content"]))
