"""Text to token ids and back, torch-free: the tokenizers library and the checkpoint's own chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, read_json
from halfmoon.engine.text.chat_template import ChatTemplate, template_source
from halfmoon.engine.text.piece_tokens import PieceTokens
from halfmoon.engine.text.prefix_tokenizer import NOTHING_AROUND, Around, PrefixTokenizer
from halfmoon.engine.text.text_pieces import PIECE_CHARS, can_be_cut
from halfmoon.errors import InvalidRequest

_REPLACEMENT = "\ufffd"
_MOST_SILENT_TOKENS = 8  # no character has so many bytes: a sequence that is not UTF-8 by then never will be
_MOST_HELD_TOKENS = 64
_MOST_UNDECIDED = 3  # replacement characters at the end of a text that may yet become one character
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_UNPRINTABLE = sorted(set(range(0x100)) - set(_PRINTABLE))
_BYTE_OF = {  # how vocabularies of bytes write them (Radford et al., GPT-2)
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(0x100 + number): byte for number, byte in enumerate(_UNPRINTABLE)},
}
_FALLBACK_BYTE = re.compile("<0x([0-9A-F]{2})>")  # how vocabularies of words write those of other characters


class Tokenizer:
    """Owns the vocabulary and the chat template of one checkpoint. Thread-safe."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = read_json(checkpoint.path / "tokenizer_config.json")
        self.config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        self._fast = load_fast_tokenizer(checkpoint.path)
        self._special_tokens = {
            name: _token_text(checkpoint.path, name, value)
            for name, value in config.items()
            if name in ("bos_token", "eos_token", "pad_token", "unk_token") and value is not None
        }
        self.chat_template = source = template_source(checkpoint.path, config)
        self._template = None if source is None else ChatTemplate(source)
        self.config |= self._special_tokens | ({} if source is None else {"chat_template": source})
        is_cut = can_be_cut(json.loads(self._fast.to_str()))
        self._around = self._found_around() if is_cut else NOTHING_AROUND
        self._pieces = PieceTokens(self._each_ids) if is_cut else None
        self._whole_texts: dict[tuple[int, bool], str | None] = {}
        self._is_bytewise = type(self._fast.decoder) is ByteLevel

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that mark something, and are no text unless it is asked for."""
        return frozenset(number for number, token in self._fast.get_added_tokens_decoder().items() if token.special)

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template reads; empty without a template."""
        return frozenset() if self._template is None else self._template.variables

    def encode(self, text: str, *, with_special: bool = True, salt: bytes = b"") -> list[int]:
        """Token ids, including those that the tokenizer puts around a text (such as a BOS).

        Texts with another salt leave no trace, not even in the time it takes.
        """
        return self._ids(text, with_special=with_special, salt=salt)

    def begin(self, text: str, *, with_special: bool = True, salt: bytes = b"") -> PrefixTokenizer:
        """Token ids of a text from its beginning, computed on demand."""
        return PrefixTokenizer(text, self._pieces, self._around if with_special else NOTHING_AROUND, salt)

    def token_name(self, token_id: int) -> str:
        """The token as the vocabulary writes it; empty for an id without one."""
        return self._fast.id_to_token(token_id) or ""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        render: Callable[[Mapping[str, Any]], str] | None = None,
    ) -> str:
        """The prompt text of a conversation, by the checkpoint's template or by another one's `render`.

        Raises InvalidRequest without a template, or when the template refuses.
        """
        context = {**self._special_tokens, **(template_kwargs or {}), "messages": messages, "tools": tools}
        context["add_generation_prompt"] = add_generation_prompt
        if render is not None:
            return render(context)
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use the completions endpoint", param="messages")
        try:
            return self._template.render(context)
        except InvalidRequest as error:
            why = f"the chat template refuses these messages: {error.message}"
            raise InvalidRequest(why, param="messages") from error

    def _ids(self, text: str, *, with_special: bool, salt: bytes = b"") -> list[int]:
        if self._pieces is None or len(text) <= PIECE_CHARS:
            return list(self._each_ids([text], with_special=with_special)[0])
        before, after = self._around if with_special else NOTHING_AROUND
        return [*before, *self._pieces.of_text(text, salt), *after]

    def _each_ids(self, texts: list[str], *, with_special: bool = False) -> list[Sequence[int]]:
        # A batch, even of one text, lets other threads run meanwhile; `encode` does not.
        return [encoding.ids for encoding in self._fast.encode_batch_fast(texts, add_special_tokens=with_special)]

    def _found_around(self) -> Around:
        """The surrounding tokens, found by encoding a text of one token."""
        ids, plain = (self._each_ids(["a"], with_special=special)[0] for special in (True, False))
        at = list(ids).index(plain[0])
        return Around(tuple(ids[:at]), tuple(ids[at + 1 :]))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of `render_chat`; the template itself writes all special tokens."""
        return self._ids(self.render_chat(messages, add_generation_prompt=add_generation_prompt), with_special=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; invalid UTF-8 becomes U+FFFD."""
        return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def part_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token that is part of a character; None if the vocabulary does not tell them."""
        name = self.token_name(token_id)
        if self._is_bytewise and name and all(letter in _BYTE_OF for letter in name):
            return bytes(_BYTE_OF[letter] for letter in name)
        fallback = _FALLBACK_BYTE.fullmatch(name)
        return None if fallback is None else bytes.fromhex(fallback[1])

    def whole_text(self, token_id: int, *, skip_special_tokens: bool = True) -> str | None:
        """The text of a token if it reads the same after any characters; None if that is not certain.

        It is certain if a text is the tokens' bytes in a row, for a token that begins and ends with a character.
        """
        key = token_id, skip_special_tokens
        if key not in self._whole_texts:
            text = (
                self.decode([token_id], skip_special_tokens=skip_special_tokens) if self._is_bytewise else _REPLACEMENT
            )
            self._whole_texts[key] = None if _REPLACEMENT in text else text or None
        return self._whole_texts[key]


class Detokenizer:
    """Owns the undecided tail of one stream of token ids: text comes out in whole characters."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, hidden: frozenset[int] = frozenset()
    ) -> None:
        """`hidden`: more tokens without text."""
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._hidden = hidden
        self._context: list[int] = []  # tokens whose text is out; the next ones decode differently without them
        self._held: list[int] = []  # tokens whose text ends inside a character
        self._num_out = 0  # characters of their text that are out

    def push(self, token_id: int) -> str:
        """The text that is now certain, possibly empty."""
        if token_id in self._hidden:
            return ""
        if not self._held:
            whole = self._tokenizer.whole_text(token_id, skip_special_tokens=self._skips)
            if whole is not None:
                self._context = [token_id]
                return whole
        self._held.append(token_id)
        text = self._new_text()
        if not text.endswith(_REPLACEMENT) or len(self._held) >= _MOST_HELD_TOKENS:
            return self._settle(text)
        if len(self._held) < _MOST_SILENT_TOKENS:
            return ""
        undecided = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MOST_UNDECIDED)
        certain = text[self._num_out : len(text) - undecided]
        self._num_out += len(certain)
        return certain

    def flush(self) -> str:
        """The text held back; an unfinished character comes out as U+FFFD."""
        return self._settle(self._new_text() if self._held else "")

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=self._skips)
        return self._tokenizer.decode(self._context + self._held, skip_special_tokens=self._skips)[len(before) :]

    def _settle(self, text: str) -> str:
        """Marks all of `text` as out; returns the part of it that was not."""
        if text:  # a token without text (a special one) adds nothing to what the next ones need
            self._context = self._held
        rest = text[self._num_out :]
        self._held, self._num_out = [], 0
        return rest


def _token_text(path: Path, name: str, value: Any) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InvalidRequest(
            f"{path / 'tokenizer_config.json'}: {name} must be a text, or an object with its content, got {value!r}",
            param="model",
        )
    return text


def load_fast_tokenizer(path: Path) -> FastTokenizer:
    """The tokenizer of a checkpoint's directory, in any format. Raises InvalidRequest for none or a broken one."""
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            return FastTokenizer.from_file(str(file))
        except Exception as error:  # the library raises no narrower class
            raise InvalidRequest(
                f"{file} cannot be read as a tokenizer: {error}; get it again", param="model"
            ) from error
    from transformers import AutoTokenizer  # imports torch; converts the older formats

    try:
        fast: FastTokenizer = AutoTokenizer.from_pretrained(path).backend_tokenizer
    except (OSError, ValueError, AttributeError) as error:
        raise InvalidRequest(
            f"{path} holds no tokenizer.json, and no older kind of tokenizer that can be read: {error}", param="model"
        ) from error
    return fast
