"""From messages or a text to the tokens of a prompt: how the template is used, and what is cut."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.engine.text.tokenizer import Tokenizer
from halfmoon.errors import InvalidRequest
from services.gateway.openai.bodies.messages import Message
from services.gateway.openai.bodies.schemas import ChatBody
from services.gateway.openai.endpoint_bodies import generation_request_of, read_body
from services.gateway.openai.prompts import text_of_chat
from services.gateway.routing.prompt_prefix import prompt_prefix_of
from tests.services.gateway.fakes import CONTEXT_TOKENS, ByteTokenizer, served_model

USER = {"role": "user", "content": "hi"}


def text(endpoint: str = "chat.completions", **fields: Any) -> str:
    """The prompt that workers get, as text."""
    model = served_model()
    body = read_body(endpoint, json.dumps(fields).encode(), model, CONTEXT_TOKENS).body
    (prompt,) = generation_request_of(body, model, CONTEXT_TOKENS, b"").prompts
    prefix = prompt_prefix_of(body, model, b"")
    if prefix is not None:
        prefix.read_on(CONTEXT_TOKENS)
        assert tuple(prefix.token_ids) == prompt  # what early rejection looks at is what is computed
    return bytes(prompt).decode()


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        text(**fields)
    return caught.value


def test_the_output_goes_on_with_the_last_message() -> None:
    begun = {"role": "assistant", "content": "The answer is "}
    assert text(messages=[USER, begun], continue_final_message=True) == "user:hi\nassistant:The answer is "
    assert text(messages=[USER, begun], continue_final_message=True, add_generation_prompt=False).endswith("is ")
    both = refusal(messages=[USER, begun], continue_final_message=True, add_generation_prompt=True)
    assert both.param == "continue_final_message"


@pytest.mark.parametrize("content", ["<", "|", "i", "assistant", "<|im_end|>", " ", ""])
def test_what_a_message_begins_with_may_be_in_the_template_too(content: str) -> None:
    model = dataclasses.replace(served_model(), tokenizer=Tokenizer(prepare_checkpoint("demo")))
    messages = [Message(role="user", content="hi"), Message(role="assistant", content=content)]
    rendered = text_of_chat(ChatBody(messages=messages, continue_final_message=True), messages, model, None)
    assert rendered.endswith(f"<|im_start|>assistant\n{content}")


def test_a_template_that_hides_the_last_message_cannot_continue_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "render_chat", lambda self, messages, **_: messages[0]["content"])
    begun = {"role": "assistant", "content": "x"}
    assert refusal(messages=[USER, begun], continue_final_message=True).param == "continue_final_message"


@pytest.mark.parametrize("num_dropped", [1, 2])
def test_a_message_that_is_left_out_is_missed_though_its_words_are_elsewhere(
    monkeypatch: pytest.MonkeyPatch, num_dropped: int
) -> None:
    monkeypatch.setattr(ByteTokenizer, "render_chat", lambda self, messages, **_: "zq" * (len(messages) - num_dropped))
    odd = [{"role": "critic", "content": "zq"}] * 4
    assert refusal(messages=[*odd]).param == f"messages[{4 - num_dropped}].role"


@pytest.mark.parametrize("content", ["The answer is", "The answer is ", " two\n\nlines\n", "hi"])
def test_a_continued_message_is_that_of_transformers(content: str) -> None:
    demo = prepare_checkpoint("demo")
    chat = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": content}]
    expected = AutoTokenizer.from_pretrained(demo.path).apply_chat_template(
        chat, tokenize=False, continue_final_message=True
    )
    model = dataclasses.replace(served_model(), tokenizer=Tokenizer(demo))
    messages = [Message.model_validate(message) for message in chat]
    body = ChatBody(messages=messages, continue_final_message=True)
    assert text_of_chat(body, messages, model, None) == expected


def test_what_the_template_is_told() -> None:
    assert text(messages=[USER], reasoning_effort="low") == 'user:hi\nkwargs:{"reasoning_effort": "low"}\n'
    told = text("responses", input="hi", reasoning={"effort": "high", "summary": "auto"})
    assert told == 'user:hi\nkwargs:{"reasoning_effort": "high"}\n'
    wins = text(messages=[USER], reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "own"})
    assert wins == 'user:hi\nkwargs:{"reasoning_effort": "own"}\n'


def test_other_roles_where_the_template_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    critic = {"role": "critic", "content": "no"}
    assert text(messages=[USER, critic]) == "user:hi\ncritic:no\n"
    monkeypatch.setattr(ByteTokenizer, "render_chat", lambda self, messages, **_: messages[0]["content"])
    assert refusal(messages=[USER, critic]).param == "messages[1].role"


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"truncate_prompt_tokens": 4}, "6789"),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, "6789"),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, "0123"),
        ({"truncate_prompt_tokens": 400}, "0123456789"),
    ],
)
def test_a_prompt_is_cut_to_as_many_tokens_as_asked(options: dict[str, Any], left: str) -> None:
    assert text("completions", prompt="0123456789", **options) == left


def test_a_prompt_is_cut_to_what_leaves_room_for_one_token() -> None:
    long = "x" * (CONTEXT_TOKENS + 50) + "end"
    assert len(text("completions", prompt=long, truncate_prompt_tokens=-1)) == CONTEXT_TOKENS - 1
    assert text(messages=[USER | {"content": long}], truncate_prompt_tokens=-1).endswith("end\n")
    assert refusal(endpoint="completions", prompt=long).param == "prompt"
    assert refusal(endpoint="completions", prompt="hi", truncate_prompt_tokens=0).param == "prompt"
