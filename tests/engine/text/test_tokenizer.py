"""The tokenizer is transformers' own, and a stream of tokens becomes a stream of whole characters."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models
from transformers import AutoTokenizer

from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.text.tokenizer import Detokenizer, Tokenizer
from halfmoon.errors import InvalidRequest

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße, 世界 🌍!"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "again"},
]


@pytest.fixture(scope="module")
def tokenizer(demo: Checkpoint) -> Tokenizer:
    return Tokenizer(demo)


@pytest.fixture(scope="module")
def reference(demo: Checkpoint) -> Any:
    return AutoTokenizer.from_pretrained(demo.path)


def test_ids_are_those_of_transformers(tokenizer: Tokenizer, reference: Any) -> None:
    for text in ("Hello world", "  spaces\n\n", "Grüße, 世界 🌍!", "<|im_start|>x", ""):
        assert tokenizer.encode(text) == reference(text)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(
            reference(text)["input_ids"], skip_special_tokens=True
        )


@pytest.mark.parametrize("messages", [CHAT, CHAT[1:], CHAT[:2]])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_are_those_of_transformers(
    messages: list[dict[str, str]], add_generation_prompt: bool, tokenizer: Tokenizer, reference: Any
) -> None:
    got = tokenizer.encode_chat(messages, add_generation_prompt=add_generation_prompt)
    expected = reference.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
    assert got == expected["input_ids"]


@settings(max_examples=80)
@given(text=st.text(max_size=30))
def test_pushed_text_is_the_decoded_text(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in pieces)


class Doubtful(Tokenizer):
    """Never certain of a token alone."""

    def whole_text(self, token_id: int, *, skip_special_tokens: bool = True) -> str | None:
        return None


@pytest.fixture(scope="module")
def doubtful(demo: Checkpoint) -> Tokenizer:
    return Doubtful(demo)


@settings(max_examples=150)
@given(ids=st.lists(st.one_of(st.integers(0, 400), st.integers(0, 49_151)), max_size=30))
def test_texts_of_whole_tokens_change_nothing(ids: list[int], tokenizer: Tokenizer, doubtful: Tokenizer) -> None:
    quick, slow = Detokenizer(tokenizer), Detokenizer(doubtful)
    assert [quick.push(one) for one in ids] == [slow.push(one) for one in ids]
    assert quick.flush() == slow.flush()
    assert any(tokenizer.whole_text(one) for one in range(400))


def test_half_a_character_waits_and_is_flushed_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🌍")
    assert len(ids) > 1
    stream = Detokenizer(tokenizer)
    assert [stream.push(token_id) for token_id in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_bytes_that_never_become_a_character_come_out(tokenizer: Tokenizer) -> None:
    lone = tokenizer.encode("🌍")[-1]
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(lone) for _ in range(20)]
    assert "".join(pieces).startswith("\ufffd")


def test_special_tokens_are_silent(tokenizer: Tokenizer) -> None:
    stream = Detokenizer(tokenizer)
    ids = [*tokenizer.encode("one"), 1, 2, *tokenizer.encode(" two")]
    assert "".join(stream.push(token_id) for token_id in ids) + stream.flush() == "one two"


def test_special_tokens_are_text_where_that_is_asked_for(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("one"), 1, 2, *tokenizer.encode(" two"), 1]
    for skips in (True, False, True):
        stream = Detokenizer(tokenizer, skips)
        text = "".join(stream.push(token_id) for token_id in ids) + stream.flush()
        assert text == tokenizer.decode(ids, skip_special_tokens=skips)


def test_single_tokens_can_be_hidden_where_special_ones_are_shown(tokenizer: Tokenizer) -> None:
    ids = [1, *tokenizer.encode("one"), 2]
    assert {1, 2} <= tokenizer.special_token_ids
    stream = Detokenizer(tokenizer, False, tokenizer.special_token_ids - {1})
    text = "".join(stream.push(token_id) for token_id in ids) + stream.flush()
    assert text == f"{tokenizer.token_name(1)}one"


def checkpoint_at(path: Path, **config: Any) -> Checkpoint:
    """A directory whose tokenizer knows a few sentencepiece-like words."""
    words = {"▁Hello": 0, "▁world": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4, "!": 5}
    fast = FastTokenizer(models.BPE(vocab=words, merges=[], byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    unused = ModelConfig("LlamaForCausalLM", "llama", 9, 8, 8, 1, 1, 1, 8, 8, 8, "silu")
    return Checkpoint(path, "x", "0", unused, frozenset(), 8, unused.vocab_size)


def test_words_keep_their_spaces_and_byte_tokens_wait(tmp_path: Path) -> None:
    stream = Detokenizer(Tokenizer(checkpoint_at(tmp_path)))
    assert [stream.push(token_id) for token_id in (0, 1, 2, 3, 4, 5)] == ["Hello", " world", "", "", "€", "!"]


@settings(max_examples=80)
@given(text=st.text(max_size=30))
def test_bytes_of_all_tokens_are_those_of_the_text(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text, with_special=False)
    content = b"".join(tokenizer.part_bytes(token_id) or b"" for token_id in ids)
    assert content.decode(errors="replace") == tokenizer.decode(ids, skip_special_tokens=False)
    if tokenizer.decode(ids) == text:  # it has no token for some bytes, which it leaves out
        assert content == text.encode()


def test_bytes_of_tokens_that_are_parts_of_characters(tokenizer: Tokenizer, tmp_path: Path) -> None:
    wordwise = Tokenizer(checkpoint_at(tmp_path))
    assert [wordwise.part_bytes(token_id) for token_id in (2, 3, 4, 0)] == [b"\xe2", b"\x82", b"\xac", None]
    assert tokenizer.part_bytes(10**6) is None


def test_without_a_chat_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer(checkpoint_at(tmp_path))
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.encode_chat(CHAT)


def test_templates_see_what_they_expect(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ tools | tojson }}{{ style }}"
    )
    checkpoint = checkpoint_at(
        tmp_path,
        chat_template=[{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}],
        bos_token={"content": "<s>"},
    )
    text = Tokenizer(checkpoint).render_chat(
        [{"role": "user", "content": "<é>"}, {"role": "tool", "content": "no"}],
        tools=[{"name": "ü"}],
        template_kwargs={"style": "!"},
    )
    assert text == '<s><é>[{"name": "ü"}]!'


def test_a_template_may_refuse(tmp_path: Path) -> None:
    refusing = checkpoint_at(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        Tokenizer(refusing).encode_chat(CHAT)
    assert caught.value.param == "messages"


def test_a_template_cannot_reach_out(tmp_path: Path) -> None:
    hostile = checkpoint_at(tmp_path, chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequest):
        Tokenizer(hostile).render_chat(CHAT)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json cannot be read as a tokenizer: Model missing"),
        ("tokenizer.json", '{"model": {"type": "X"}}', "tokenizer.json cannot be read as a tokenizer"),
        ("tokenizer_config.json", '{"bos_token": {"x": 1}}', "tokenizer_config.json: bos_token must be a text"),
        ("tokenizer_config.json", '{"eos_token": 5}', "tokenizer_config.json: eos_token must be a text"),
        ("tokenizer_config.json", '{"chat_template": 5}', "tokenizer_config.json: chat_template must be a text"),
        ("tokenizer_config.json", '{"chat_template": [1]}', "chat_template must be a text, or a list of objects"),
        ("tokenizer_config.json", '{"chat_template": "{% if"}', "TemplateSyntaxError"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not a text in UTF-8"),
    ],
)
def test_broken_files_are_named(
    name: str, content: str | bytes, message: str, demo: Checkpoint, tmp_path: Path
) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.path / file, tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidRequest, match=message):
        Tokenizer(replace(demo, path=tmp_path))
