"""Traces: what is written is read again, whatever its order, and every wrong row is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from halfmoon.sim.workloads.traces import read_workload
from halfmoon.sim.workloads.workload import Prefixes, Workload

ROWS = st.lists(
    st.tuples(
        st.integers(0, 10**6), st.integers(1, 10**5), st.integers(1, 10**4), st.lists(st.integers(0, 99), max_size=4)
    ),
    min_size=1,
    max_size=20,
)


def written(path: Path, rows: list[dict[str, Any]], *, is_lines: bool) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n" if is_lines else json.dumps({"requests": rows}))
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(ROWS, st.booleans())
def test_both_forms_of_rows_say_the_same(tmp_path: Path, rows: list[Any], is_lines: bool) -> None:
    plain = [{"start_time": ms / 1000, "prompt_len": n, "output_len": m, "hash_ids": ids} for ms, n, m, ids in rows]
    mooncake = [{"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": ids} for ms, n, m, ids in rows]
    first = read_workload(written(tmp_path / "plain.json", plain, is_lines=is_lines))
    second = read_workload(written(tmp_path / "mooncake.jsonl", mooncake, is_lines=not is_lines))
    for found in (first, second):
        assert found.start_s[0] == 0.0
        assert (np.diff(found.start_s) >= 0).all()
        assert found.file_rows is not None
        assert found.prefixes is not None
        assert found.prefixes.block_tokens == 512
        for index, row in enumerate(found.file_rows.tolist()):
            _, prompt, output, ids = rows[row]
            assert (found.prompt_tokens[index], found.output_tokens[index]) == (prompt, output)
            assert found.prefixes.of(index).tolist() == ids
    assert first.start_s == pytest.approx(second.start_s)


def test_an_answer_is_what_the_next_turn_of_its_chat_repeats(tmp_path: Path) -> None:
    """Requests of 3 whole blocks and a part; the first one's answer ends in block 5. A common beginning is no chat."""
    rows = [
        (3 * 512 + 100, 1000, [0, 1, 2, 30]),
        (2 * 512, 600, [0, 1]),  # asks what the first one began with, and begins no chat
        (7 * 512, 10, [0, 1, 2, 3, 4, 5, 6]),  # the first one's next turn
        (7 * 512, 10, [0, 1, 2, 8, 9, 10, 11]),  # comes too late for it
        (7 * 512 + 200, 512, [0, 1, 2, 3, 4, 5, 6, 70]),  # the next turn, all of whose whole blocks were known
        (8 * 512 + 100, 1, [0, 1, 2, 3, 4, 5, 6, 7, 80]),  # is shorter than question and answer
    ]
    lines = [
        {"timestamp": n, "input_length": p, "output_length": o, "hash_ids": ids} for n, (p, o, ids) in enumerate(rows)
    ]
    found = read_workload(written(tmp_path / "chats.jsonl", lines, is_lines=True)).prefixes
    assert found is not None
    assert found.answers is not None
    answers = [found.answers.of(index).tolist() for index in range(len(rows))]
    assert answers[0] == [3, 4]
    assert [len(one) for one in answers] == [2, 1, 0, 0, 1, 0]
    new = [block for one in answers[1:] for block in one]
    assert len(set(new)) == len(new)
    assert min(new) > 80
    assert found.sequence(0, rows[0][0]) == [0, 1, 2, 3, 4]
    again = found.repeated(2)
    assert again.answers is not None
    assert again.sequence(6, rows[0][0]) == [block + max(new) + 1 for block in [0, 1, 2, 3, 4]]
    assert found.taken(np.array([4])).sequence(0, rows[4][0])[-1] == answers[4][0]


@given(ROWS, st.integers(1, 4))
def test_a_repeated_workload_shares_no_prefix_between_passes(rows: list[Any], times: int) -> None:
    ids = [ids for *_, ids in rows]
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in ids])])
    flat = np.array([block_id for one in ids for block_id in one], dtype=np.int64)
    prefixes = Prefixes(512, flat, offsets).repeated(times)
    passes = [set(part.tolist()) for part in np.split(prefixes.ids, times)] if len(flat) else []
    assert sum(map(len, passes)) == len(set(prefixes.ids.tolist()))
    for index in range(times * len(rows)):
        here = prefixes.of(index).tolist()
        once = ids[index % len(rows)]
        assert [block_id - here[0] for block_id in here] == [block_id - once[0] for block_id in once]


@pytest.mark.parametrize("factor", [0.25, 1.0, 40.0])
def test_a_faster_workload_has_the_same_requests(factor: float) -> None:
    rng = np.random.default_rng(1)
    workload = Workload(np.sort(rng.uniform(0, 60, 50)), rng.integers(1, 99, 50), rng.integers(1, 99, 50))
    faster = workload.scaled(factor)
    assert faster.rate_per_s == pytest.approx(factor * workload.rate_per_s)
    assert faster.prompt_tokens is workload.prompt_tokens
    assert workload.repeated(3).rate_per_s == pytest.approx(workload.rate_per_s)
    assert len(workload.repeated(3)) == 150


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"start_time": "now", "prompt_len": 1, "output_len": 1}, "start_time is 'now', and must be a finite number"),
        ({"start_time": True, "prompt_len": 1, "output_len": 1}, "start_time is True"),
        ({"start_time": 1.0, "prompt_len": 0, "output_len": 1}, "prompt_len is 0, and must be a whole number from 1"),
        ({"start_time": 1.0, "prompt_len": 1.5, "output_len": 1}, "prompt_len is 1.5"),
        ({"timestamp": 5, "input_length": 1}, "'output_length' is missing"),
        ({"timestamp": 5, "input_length": 1, "output_length": -1}, "output_length is -1"),
    ],
)
def test_the_wrong_row_is_named(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    good = {"start_time": 0.5, "prompt_len": 3, "output_len": 2}
    with pytest.raises(InvalidRequest, match="request 1 of the workload") as caught:
        read_workload(written(tmp_path / "trace.jsonl", [good, row], is_lines=True))
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("ids", "says"), [(["a"], "not whole numbers"), ([True], "not whole numbers"), ([2**70], "not whole numbers")]
)
def test_prefixes_are_whole_numbers(tmp_path: Path, ids: list[Any], says: str) -> None:
    row = {"start_time": 0.5, "prompt_len": 3, "output_len": 2, "hash_ids": ids}
    with pytest.raises(InvalidRequest, match=says):
        read_workload(written(tmp_path / "trace.json", [row], is_lines=False))
