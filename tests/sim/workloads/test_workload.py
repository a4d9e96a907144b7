"""Workloads: columns, scaling, trace files, arrivals, lengths."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.sim.workloads.drawn_workload import ArrivalProcess, arrivals, synthetic_workload
from halfmoon.sim.workloads.lengths import KNOWN_LENGTHS, Lognormal, named_lengths
from halfmoon.sim.workloads.named_workload import named_workload
from halfmoon.sim.workloads.traces import read_workload
from halfmoon.sim.workloads.workload import Prefixes, Workload


def make(start_s: list[float], prompt: list[int] | None = None) -> Workload:
    lengths = np.array(prompt or [10] * len(start_s))
    return Workload(np.array(start_s), lengths, np.full(len(start_s), 5))


def test_scaling_keeps_the_order_and_changes_the_rate() -> None:
    workload = make([2.0, 3.0, 6.0])
    assert workload.rate_per_s == pytest.approx(0.5)
    assert workload.scaled(2).start_s.tolist() == [0.0, 0.5, 2.0]
    assert workload.at_rate(4).rate_per_s == pytest.approx(4)


@pytest.mark.parametrize(
    ("start_s", "prompt", "param"),
    [([1.0, 0.0], [1, 1], "start_s"), ([0.0], [0], "prompt_tokens"), ([0.0, float("nan")], [1, 1], "start_s")],
)
def test_columns_that_make_no_sense_are_refused(start_s: list[float], prompt: list[int], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make(start_s, prompt)
    assert caught.value.param == param


def test_a_workload_without_a_rate_cannot_be_given_one() -> None:
    with pytest.raises(InvalidRequest, match="two arrival times"):
        make([0.0]).at_rate(1)


def test_rows_are_taken_with_their_prefixes() -> None:
    prefixes = Prefixes(512, np.array([0, 1, 2, 0, 3]), np.array([0, 2, 3, 5]))
    workload = Workload(np.arange(3.0), np.full(3, 1024), np.full(3, 1), prefixes)
    taken = workload.taken(np.array([0, 2]))
    assert taken.prefixes is not None
    assert [taken.prefixes.of(index).tolist() for index in range(2)] == [[0, 1], [0, 3]]


def written(path: Path, rows: Any, *, lines: bool = False) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
    return path


def test_plain_rows_are_sorted_by_arrival(tmp_path: Path) -> None:
    rows = [
        {"start_time": 3.0, "prompt_len": 7, "output_len": 2},
        {"start_time": 1.0, "prompt_len": 5, "output_len": 1},
    ]
    workload = read_workload(written(tmp_path / "w.json", rows))
    assert workload.start_s.tolist() == [0.0, 2.0]
    assert workload.prompt_tokens.tolist() == [5, 7]
    assert workload.prefixes is None


def test_mooncake_lines_have_prefixes(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 1500, "input_length": 600, "output_length": 0, "hash_ids": [0, 2]},
    ]
    workload = read_workload(written(tmp_path / "t.jsonl", rows, lines=True))
    assert workload.start_s.tolist() == [0.0, 1.5]
    assert workload.output_tokens.tolist() == [3, 1]  # an answer has at least its first token
    assert workload.prefixes is not None
    assert workload.prefixes.block_tokens == 512
    assert workload.prefixes.of(1).tolist() == [0, 2]


def test_azure_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,3180,8\n"
    )
    workload = read_workload(path)
    assert workload.start_s == pytest.approx([0.0, 0.5])
    assert workload.prompt_tokens.tolist() == [4808, 3180]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("w.json", '[{"start_time": 0, "prompt_len": 1}]', "request 0.*output_len.*missing"),
        ("w.json", '[{"start_time": 0, "prompt_len": "long", "output_len": 1}]', "request 0"),
        ("w.json", '[{"start_time": 0, "prompt_len": 1, "output_len": -5}]', "request 0.*output_len is -5"),
        ("w.json", '[{"start_time": 0, "prompt_len": 1, "output_len": NaN}]', "request 0"),
        ("w.json", '[{"start_time": 0, "prompt_len": 10.7, "output_len": 1}]', "prompt_len is 10.7"),
        ("w.json", '[{"start_time": 0, "prompt_len": 1e30, "output_len": 1}]', "prompt_len is 1e.30"),
        ("w.json", '[{"start_time": 0, "prompt_len": Infinity, "output_len": 1}]', "request 0"),
        ("w.json", '[{"start_time": true, "prompt_len": 1, "output_len": 1}]', "request 0.*start_time is True"),
        ("w.json", '[{"start_time": "5", "prompt_len": 1, "output_len": 1}]', "request 0.*start_time is '5'"),
        ("w.jsonl", '{"timestamp": true, "input_length": 1, "output_length": 1}', "request 0.*timestamp is True"),
        ("w.json", "[]", "no requests"),
        ("w.json", "3", "should|is not JSON rows"),
        ("w.jsonl", '{"timestamp": 0, "input_length": 1, "output_length": 1}\n{', "request 1"),
        ("w.csv", "TIMESTAMP,ContextTokens\n2023-11-16,1\n", "request 0"),
        ("w.json", '[{"start_time": 0, "prompt_len": 1, "output_len": 1, "hash_ids": ["a"]}]', "whole numbers"),
        ("w.json", '[{"start_time": 0, "prompt_len": 1, "output_len": 1, "hash_ids": [1.5]}]', "whole.*1.5"),
        ("w.json", '[{"start_time": 0, "prompt_len": 1, "output_len": 1, "hash_ids": [true]}]', "whole.*True"),
        (
            "w.json",
            '[{"start_time": 0, "prompt_len": 1, "output_len": 1, "hash_ids": [1], "block_tokens": true}]',
            "blocks of .*True",
        ),
    ],
)
def test_a_file_that_is_no_workload_says_where_it_is_wrong(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=says):
        read_workload(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"nowhere\.json cannot be read"):
        read_workload(tmp_path / "nowhere.json")


@pytest.mark.parametrize(("process", "cv"), [("poisson", 1.0), ("gamma", 3.0), ("gamma", 0.3), ("constant", 0.0)])
def test_gaps_have_the_mean_and_variation_of_their_process(process: ArrivalProcess, cv: float) -> None:
    start_s = arrivals(process, 100_001, 20.0, np.random.default_rng(1), cv)
    gaps_s = np.diff(start_s)
    assert start_s[0] == 0
    assert gaps_s.mean() == pytest.approx(0.05, rel=0.05)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)


@pytest.mark.parametrize("rate_per_s", [0.0, -1.0, float("nan")])
def test_a_rate_must_be_above_zero(rate_per_s: float) -> None:
    with pytest.raises(InvalidRequest, match="rate"):
        arrivals("poisson", 3, rate_per_s, np.random.default_rng(1))


@pytest.mark.parametrize("name", KNOWN_LENGTHS)
def test_drawn_lengths_have_the_mean_they_say(name: str) -> None:
    prompt = KNOWN_LENGTHS[name].prompt
    assert prompt.sample(200_000, np.random.default_rng(1), 1 << 30).mean() == pytest.approx(
        prompt.mean_tokens, rel=0.05
    )


def test_lengths_are_cut_and_never_zero() -> None:
    drawn = Lognormal(2.0, 2.0).sample(1_000, np.random.default_rng(1), 5)
    assert drawn.min() == 1
    assert drawn.max() == 5


def test_lengths_by_name() -> None:
    constant = named_lengths("in=512,out=64")
    assert constant.prompt.sample(2, np.random.default_rng(1), 1 << 20).tolist() == [512, 512]
    with pytest.raises(InvalidRequest, match="chat, code"):
        named_lengths("in=0,out=1")


def test_another_rate_draws_the_same_requests() -> None:
    one, other = (synthetic_workload(KNOWN_LENGTHS["chat"], 50, rate, seed=4) for rate in (1.0, 7.0))
    assert one.prompt_tokens.tolist() == other.prompt_tokens.tolist()
    assert one.at_rate(7).start_s == pytest.approx(other.at_rate(7).start_s)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rate_per_s": math.inf}, "finite, got inf"),
        ({"cv": math.inf}, "at most 100, got inf"),
        ({"cv": 1e300}, "at most 100, got 1e"),
        ({"num": 10**26}, "at most 10,000,000 requests are drawn"),
    ],
)
def test_a_workload_that_cannot_be_drawn_is_refused(change: dict[str, Any], says: str) -> None:
    asked = {"rate_per_s": 1.0, "num": 5, "process": "gamma", "cv": 1.0, "seed": 0}
    with pytest.raises(InvalidRequest, match=says):
        named_workload("chat", **{**asked, **change})


def test_a_context_of_any_length_holds_all_requests() -> None:
    workload = named_workload("in=5,out=2", 1.0, 3, "poisson", 1.0, 0)
    assert workload.within(10**30).prompt_tokens.tolist() == [5, 5, 5]
