"""Structured output: what the demo model says under a constraint is valid, wherever its tokens were drawn."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.constraint import TokenMasks, check_constraint
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import ONE_LINE_STYLE, Constraint, EngineRequest, SamplingParams, TokenOutput
from halfmoon.engine.text.tokenizer import Tokenizer
from halfmoon.errors import InvalidRequest
from tests.engine.random_schemas import random_schema

NUM_SCHEMAS = 12
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LARK = 'start: "a" "b"+ ("c" | "d")'
GBNF = 'root ::= "a" "b"+ ("c" | "d")'


def json_schema(schema: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(schema))


def masks_of(checkpoint: Checkpoint) -> TokenMasks:
    return TokenMasks(checkpoint.path, checkpoint.model_config.vocab_size, checkpoint.eos_token_ids)


class Speaker:
    """An engine of the demo model and its tokenizer."""

    def __init__(self, checkpoint: Checkpoint, **options: Any) -> None:
        self.engine = Engine(checkpoint, EngineConfig(**{"num_blocks": 96, "max_running": 16, **options}))
        self.tokenizer = Tokenizer(checkpoint)
        self.eos = checkpoint.eos_token_ids
        self.num_preempted = 0

    def say(self, constraints: Sequence[Constraint], question: str = "Tell me about Ann.", **options: Any) -> list[str]:
        """One answer a constraint, all of them at once."""
        prompt = tuple(self.tokenizer.encode_chat([{"role": "user", "content": question}]))
        answers: list[list[int]] = [[] for _ in constraints]
        for number, constraint in enumerate(constraints):
            sampling = SamplingParams(**{"max_tokens": 250, "seed": number, "constraint": constraint, **options})
            self.engine.add(EngineRequest(str(number), prompt, sampling))
        while self.engine.has_work():
            step = self.engine.step()
            self.num_preempted += step.num_preempted
            for output in step.outputs:
                assert output.finish_reason in (None, "stop")
                answers[int(output.request_id)].append(output.token_id)
        return [self.tokenizer.decode([one for one in ids if one not in self.eos]) for ids in answers]


def test_what_is_said_is_what_was_asked_for(demo: Checkpoint) -> None:
    speaker = Speaker(demo)
    asked = [
        json_schema(PERSON),
        Constraint("regex", "[A-Z][a-z]{2,8}, [0-9]{1,3} years"),
        Constraint("choice", json.dumps(["yes", 'no "way"\n', "größer 🌓"])),
        Constraint("grammar", LARK),
        Constraint("grammar", GBNF),
    ]
    for temperature in (0.0, 1.5):
        person, years, choice, lark, gbnf = speaker.say(asked, temperature=temperature)
        jsonschema.validate(json.loads(person), PERSON)
        assert re.fullmatch(asked[1].source, years)
        assert choice in json.loads(asked[2].source)
        assert re.fullmatch("ab+[cd]", lark)
        assert re.fullmatch("ab+[cd]", gbnf)


@pytest.mark.slow
def accepts(constraint: Constraint, text: str, masks: TokenMasks, tokenizer: Tokenizer, eos: int) -> bool:
    """Whether the whole text may be the output."""
    output: list[int] = []
    for token_id in [*tokenizer.encode(text), eos]:
        if not masks.allowed(constraint, output)[token_id]:
            return False
        output.append(token_id)
    return True


@pytest.mark.parametrize(
    ("text", "is_free", "is_one_line"),
    [
        ('{"name": "Ann", "age": 3}', True, True),
        ('{"name":"Ann","age":3}', True, False),
        ('{\n  "name": "Ann",\n  "age": 3\n}', True, False),
        ('{\n\t"name": "Ann",\n\t"age": 3\n}', True, False),
        ('{\n  "name": "Ann", "age": 3\n}', True, False),
        ('{ "name": "Ann", "age": 3}', True, False),
        ('{  "name": "Ann", "age": 3}', False, False),
        ('{\n\n"name": "Ann", "age": 3}', False, False),
        ("{\n" + " " * 40 + '"name": "Ann", "age": 3}', False, False),
    ],
)
def test_json_has_the_white_space_that_models_write(
    demo: Checkpoint, text: str, is_free: bool, is_one_line: bool
) -> None:
    """But not so much that an output never gets on. A schema can ask for one line."""
    masks, tokenizer, eos = masks_of(demo), Tokenizer(demo), min(demo.eos_token_ids)
    assert accepts(json_schema(PERSON), text, masks, tokenizer, eos) == is_free
    one_line = json_schema({**PERSON, "x-guidance": ONE_LINE_STYLE})
    assert accepts(one_line, text, masks, tokenizer, eos) == is_one_line


def test_random_schemas(demo: Checkpoint) -> None:
    rng = Random(7)
    schemas = [random_schema(rng) for _ in range(NUM_SCHEMAS)]
    answers = Speaker(demo).say([json_schema(schema) for schema in schemas], "Fill this form at random.")
    for schema, answer in zip(schemas, answers, strict=True):
        jsonschema.validate(json.loads(answer), schema)


def test_preempted_outputs_go_on_as_they_began(demo: Checkpoint) -> None:
    asked = [json_schema(PERSON), Constraint("regex", "([a-z]{3,9} ){9}end")] * 2
    calm = Speaker(demo, dtype="float32").say(asked, max_tokens=90)
    cramped = Speaker(demo, dtype="float32", num_blocks=10, block_tokens=16)
    assert cramped.say(asked, max_tokens=90) == calm
    assert cramped.num_preempted


def test_a_mask_is_a_function_of_the_tokens(demo: Checkpoint) -> None:
    tokenizer, kept, constraint = Tokenizer(demo), masks_of(demo), json_schema(PERSON)
    output = tokenizer.encode('{"name": "Ann", "age": 7}')
    for length in range(len(output) + 1):
        steady = kept.allowed(constraint, output[:length])
        assert np.array_equal(steady, masks_of(demo).allowed(constraint, output[:length]))
        assert np.array_equal(steady, kept.allowed(constraint, output[:length]))  # a second request, or a second try
        assert length == len(output) or steady[output[length]]
        assert steady[list(demo.eos_token_ids)].any() == (length == len(output))
    with pytest.raises(ValueError, match="structured output"):
        kept.allowed(constraint, tokenizer.encode("no JSON"))


def test_old_constraints_are_forgotten_and_read_again(demo: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfmoon.engine.constraint._MOST_SOURCE_CHARS", 20_000)
    masks, whole = masks_of(demo), Tokenizer(demo).encode("1234567890")
    asked = [Constraint("regex", f"(x{number}|[0-9]){{12}}") for number in range(9)]
    for length in range(len(whole)):
        for constraint in asked:
            assert masks.allowed(constraint, whole[:length])[whole[length]]
    assert len(masks._automata) == 4
    huge = Constraint("regex", "a" * 30_000)
    assert masks.allowed(huge, []).any()
    assert len(masks._automata) == 1


def test_what_cannot_be_used_is_refused_with_the_reason() -> None:
    for good in (json_schema({}), json_schema(PERSON), Constraint("grammar", GBNF), Constraint("choice", '["a", ""]')):
        check_constraint(good)
    for kind, source, reason in (
        ("json_schema", '{"type": "nonsense"}', "nonsense"),
        ("json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("json_schema", "[", "json schema"),
        ("regex", "[a", "regex"),
        ("regex", "(?=a)", "look-around"),
        ("grammar", "start: nothing", "nothing"),
        ("grammar", "hello", "Expected ::="),
        ("grammar", "", "No 'root' rule"),
        ("choice", "[]", "choice"),
        ("json_schema", '{"$ref": "#"}', "no output can begin"),
        ("regex", r"a[^\s\S]", "no output can begin"),
        ("grammar", "start: start", "no output can begin"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            check_constraint(Constraint(kind, source))  # type: ignore[arg-type]


def test_a_constraint_that_fails_fails_its_row_alone(demo: Checkpoint) -> None:
    speaker = Speaker(demo)
    bad = EngineRequest("bad", (5, 6), SamplingParams(max_tokens=5, constraint=Constraint("regex", "[")))
    good = EngineRequest("good", (5, 6), SamplingParams(max_tokens=5))
    for request in (bad, good):
        speaker.engine.add(request)
    outputs = speaker.engine.step().outputs
    assert {(one.request_id, one.finish_reason) for one in outputs} == {("bad", "constraint"), ("good", None)}


@pytest.mark.parametrize(
    "costly",
    [
        Constraint("choice", json.dumps(["a" * 200 + str(number) for number in range(1_000)])),
        Constraint("grammar", "start: " + "|".join(f'"a{number}"' for number in range(3_000))),
    ],
)
def test_a_constraint_that_needs_too_much_work_ends_its_output_by_name(
    demo: Checkpoint, costly: Constraint, caplog: pytest.LogCaptureFixture
) -> None:
    """It passes the check over bytes; the vocabulary's long tokens take more work."""
    check_constraint(costly)
    speaker = Speaker(demo)
    speaker.engine.add(EngineRequest("bad", (5, 6), SamplingParams(max_tokens=40, constraint=costly)))
    outputs: list[TokenOutput] = []
    while speaker.engine.has_work():
        outputs += speaker.engine.step().outputs
    assert outputs[-1].finish_reason == "constraint"
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


@pytest.mark.parametrize(("name", "value"), [("ignore_eos", True), ("min_tokens", 3)])
def test_what_does_not_go_with_a_constraint_is_named(demo: Checkpoint, name: str, value: Any) -> None:
    sampling = SamplingParams(max_tokens=9, constraint=Constraint("regex", "a"), **{name: value})
    with pytest.raises(InvalidRequest) as caught:
        Speaker(demo).engine.add(EngineRequest("a", (5,), sampling))
    assert caught.value.param == name


def test_a_tokenizer_of_an_older_format_will_do(demo: Checkpoint, tmp_path: Path) -> None:
    described = json.loads((demo.path / "tokenizer.json").read_text())
    vocabulary = {**described["model"]["vocab"], **{one["content"]: one["id"] for one in described["added_tokens"]}}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    merges = [one if isinstance(one, str) else " ".join(one) for one in described["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    older = replace(demo, path=tmp_path)
    whole = masks_of(demo).allowed(Constraint("choice", '["yes", "no"]'), [])
    assert np.array_equal(masks_of(older).allowed(Constraint("choice", '["yes", "no"]'), []), whole)
    assert whole.sum() < 20


@pytest.mark.parametrize("begins", [True, False])
def test_it_binds_what_follows_the_reasoning(demo: Checkpoint, begins: bool) -> None:
    masks, tokenizer = masks_of(demo), Tokenizer(demo)
    begin, end = 5, 6  # any tokens
    plain = Constraint("regex", "ab")
    constraint = replace(plain, begins_reasoning=begin if begins else None, ends_reasoning=end)
    first = masks.allowed(plain, ())
    (b,) = tokenizer.encode("b", with_special=False)
    (a,) = tokenizer.encode("a", with_special=False)
    thought = (begin, 40, 41) if begins else (40, 41)
    free = masks.allowed(constraint, thought)
    assert free[[40, 41, b]].all()
    assert not free[list(demo.eos_token_ids)].any()
    assert (masks.allowed(constraint, (*thought, end)) == first).all()
    assert masks.allowed(constraint, (*thought, end, a))[b]
    assert not masks.allowed(constraint, (*thought, end, a))[a]
    if begins:
        assert set(np.flatnonzero(masks.allowed(constraint, ()) != first)) == {begin}
        assert masks.allowed(constraint, (a,))[b]  # it does not reason
        with pytest.raises(ValueError, match="structured output"):
            masks.allowed(constraint, (40,))
