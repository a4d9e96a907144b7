"""Structured output: which tokens may come next under a schema, an expression, a choice or a grammar. No torch.

The library llguidance does the work. The allowed tokens are a function of the constraint and of the output tokens so
far, so any process can continue where another stopped: after a hand-over, a preemption or a worker's death.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from numpy.typing import NDArray

from halfmoon.engine.reference_depth import check_reference_depth
from halfmoon.engine.request import JSON_STYLE, Constraint
from halfmoon.engine.text.tokenizer import load_fast_tokenizer
from halfmoon.errors import ConstraintFailed, InvalidRequest

_MOST_OUTPUTS = 1_024  # of one constraint; the least recently used are dropped
_MOST_SOURCE_CHARS = 1 << 22  # of all constraints, likewise: an automaton takes about 60 bytes for each
_LEAST_SOURCE_CHARS = 4_096
_LEXER_FUEL, _STEP_FUEL = 200_000, 100_000  # to begin an automaton and per mask: hostile ones stop within 0.1 s
_VIOLATIONS = "doesn't satisfy the grammar", "parser stopped"  # of the library: a token is not allowed


def check_constraint(constraint: Constraint) -> None:
    """Raises InvalidRequest, with the library's reason, if a constraint does not compile or allows no first token."""
    grammar = _grammar(constraint)
    problem = LLMatcher.validate_grammar(grammar, limits=_limits())
    if not problem or problem.startswith("WARNING"):
        problem = "" if _can_begin(grammar) else "no output can begin as it says"
    if problem:
        raise InvalidRequest(f"the {constraint.kind.replace('_', ' ')} cannot be used: {problem}")


def _can_begin(grammar: str) -> bool:
    """Tests in bytes, of which the tokens of every vocabulary are made."""
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=_limits())
    matcher.compute_bitmask()
    return not matcher.is_error()


def _limits() -> LLParserLimits:
    """Limits for one constraint: other requests wait for its mask, so one that needs more fails alone."""
    return LLParserLimits(
        initial_lexer_fuel=_LEXER_FUEL, step_lexer_fuel=_STEP_FUEL, verbose_errors=False
    )  # verbose ones hold the whole grammar


def _grammar(constraint: Constraint) -> str:
    """The grammar in llguidance's own form."""
    try:
        check_reference_depth(constraint)
        match constraint.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(constraint.source, defaults=JSON_STYLE)
            case "choice":
                choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(constraint.source))
                if not choices:
                    raise InvalidRequest("the choice cannot be used: it is empty")
                return LLMatcher.grammar_from_lark(f"start: {choices}")
            case "regex" | "grammar":
                return grammar_from(constraint.kind, constraint.source)
    except ValueError as error:
        forms = ", neither as Lark's nor as GBNF" if constraint.kind == "grammar" else ""
        raise InvalidRequest(f"the {constraint.kind.replace('_', ' ')} cannot be used{forms}: {error}") from error


def _cost(constraint: Constraint) -> int:
    return _LEAST_SOURCE_CHARS + len(constraint.source)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


class _Automata:
    """Owns the automata of one constraint: a fresh one, and those of outputs by their tokens. They share its grammar.

    One that is missing is rebuilt from the tokens, so forgetting it loses nothing.
    """

    def __init__(self, fresh: Any) -> None:
        self._fresh = fresh
        self._started: OrderedDict[tuple[int, ...], list[Any]] = OrderedDict()

    def take(self, output: tuple[int, ...]) -> Any:
        """The automaton behind `output`, which it leaves. Raises ConstraintFailed or ValueError."""
        matcher = self._taken(output)
        if matcher is not None:
            return matcher
        matcher, rest = (self._taken(output[:-1]), output[-1:]) if output else (None, output)
        if matcher is None:
            matcher, rest = self._fresh.deep_copy(), output
        if rest and not matcher.consume_tokens(list(rest)):
            problem = _first_line(matcher.get_error())
            is_violation = not problem or any(text in problem for text in _VIOLATIONS)
            raise (ValueError if is_violation else ConstraintFailed)(f"structured output: {problem}")
        return matcher

    def put(self, output: tuple[int, ...], matcher: Any) -> None:
        """Keeps an automaton for the next token of this output."""
        self._started.setdefault(output, []).append(matcher)
        if len(self._started) > _MOST_OUTPUTS:
            self._started.popitem(last=False)

    def _taken(self, output: tuple[int, ...]) -> Any:
        waiting = self._started.get(output)
        if waiting is None:
            return None
        matcher = waiting.pop()
        if not waiting:
            del self._started[output]
        return matcher


class TokenMasks:
    """Owns the automata of constrained outputs, by constraint. One thread at a time."""

    def __init__(self, checkpoint_path: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._path = checkpoint_path
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._automata: OrderedDict[Constraint, _Automata] = OrderedDict()  # the least recently used first
        self._num_chars = 0  # of all their sources, with what each costs at least

    def allowed(self, constraint: Constraint, output: Sequence[int]) -> NDArray[np.bool_]:
        """[vocab_size]: which tokens may follow `output`, including an end-of-sequence token where the output may end.

        Raises InvalidRequest for an unusable constraint, ConstraintFailed for one that allows no token or needs more
        work than is allowed, ValueError for an output that violates it.
        """
        if constraint.ends_reasoning is not None:
            return self._allowed_behind(constraint.ends_reasoning, constraint, output)
        automata = self._automata_of(constraint)
        matcher = automata.take(tuple(output))
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error() or not bits.any():
            raise ConstraintFailed(f"structured output: {_first_line(matcher.get_error())}")
        automata.put(tuple(output), matcher)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)

    def _allowed_behind(self, end: int, constraint: Constraint, output: Sequence[int]) -> NDArray[np.bool_]:
        """What `allowed` returns for a constraint that binds only what follows the reasoning: all but an end before."""
        begin = constraint.begins_reasoning
        is_reasoned = begin is None or (len(output) > 0 and output[0] == begin)
        if is_reasoned and end not in output:
            free = np.ones(self._vocab_size, dtype=np.bool_)
            free[list(self._eos_token_ids)] = False
            return free
        answer = output[output.index(end) + 1 :] if is_reasoned else output
        allowed = self.allowed(replace(constraint, begins_reasoning=None, ends_reasoning=None), answer)
        if not output and begin is not None:
            allowed[begin] = True
        return allowed

    def _automata_of(self, constraint: Constraint) -> _Automata:
        automata = self._automata.get(constraint)
        if automata is None:
            fresh = LLMatcher(self._tokenizer, _grammar(constraint), log_level=0, limits=_limits())
            automata = self._automata[constraint] = _Automata(fresh)
            self._num_chars += _cost(constraint)
            while self._num_chars > _MOST_SOURCE_CHARS and len(self._automata) > 1:
                forgotten, _ = self._automata.popitem(last=False)
                self._num_chars -= _cost(forgotten)
        self._automata.move_to_end(constraint)
        return automata

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokenizer over the vocabulary's bytes, built lazily: most engines never need it."""
        described = load_fast_tokenizer(self._path).to_str()
        return LLTokenizer(described, n_vocab=self._vocab_size, eos_token=sorted(self._eos_token_ids))
