"""Refuses a text far too long for the context before it is tokenized as a whole.

A tokenizer works in one go, and nothing else runs meanwhile, the event loop included: a text is counted in slices
first, and only what may fit goes to it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sized

from halfmoon.policy.placement.place import ContextLengthExceeded

_MAX_CHARS_PER_TOKEN = 256  # the longest tokens of known vocabularies are 128 spaces
_SLICE_CHARS = 4_096
_CLEARLY_TOO_MANY = 2  # contexts: a text that is cut into slices has more tokens than the whole, but not twice as many


def refuse_hopeless(text: str, encode: Callable[[str], Sized], context_tokens: int, param: str) -> None:
    """Raises ContextLengthExceeded for a text that cannot fit; one that passes may still be somewhat too long."""
    if len(text) <= max(context_tokens, _SLICE_CHARS):
        return
    if len(text) > context_tokens * _MAX_CHARS_PER_TOKEN:
        raise _exceeded(context_tokens, f"{len(text)} characters", param)
    num_tokens = 0
    for start in range(0, len(text), _SLICE_CHARS):
        num_tokens += len(encode(text[start : start + _SLICE_CHARS]))
        if num_tokens > context_tokens * _CLEARLY_TOO_MANY:
            raise _exceeded(context_tokens, f"more than {num_tokens // _CLEARLY_TOO_MANY}", param)


def _exceeded(context_tokens: int, size: str, param: str) -> ContextLengthExceeded:
    message = f"the context length is {context_tokens} tokens, the prompt has {size}; shorten {param}"
    return ContextLengthExceeded(message, param=param)
