"""Traces: what is written is read again, whatever its order, and every wrong row is named."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from halfmoon.sim.workloads.named_workload import named_workload
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


ROW = {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [1]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (json.dumps({**ROW, "block_tokens": []}), r"request 0 .*block_tokens is \[\]"),
        (json.dumps({**ROW, "block_tokens": 10**30}), "block_tokens is 1000"),
        (json.dumps(ROW) + "\n" + json.dumps({**ROW, "block_tokens": 256}), "give all rows one block_tokens"),
        (json.dumps({**ROW, "hash_ids": ""}), "hash_ids is '', and must be a list"),
        (json.dumps({**ROW, "input_length": "700"}), "input_length is '700', and must be a whole number"),
        (json.dumps({**ROW, "input_length": None}), "input_length is None, and must be a whole number"),
        ('{"timestamp": 0, "timestamp": 9, "input_length": 7, "output_length": 3}', "'timestamp' is written twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"timestamp": ' + "9" * 5000 + "}", "request 0 .* wrong"),
        (json.dumps(ROW) + "\n" + json.dumps({**ROW, "timestamp": 1e300}), "arrive within 1e.297 s.*correct the times"),
        (
            json.dumps({**ROW, "timestamp": -1e308}) + "\n" + json.dumps({**ROW, "timestamp": 1e308}),
            "correct the times",
        ),
    ],
)
def test_a_text_that_is_no_trace_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=says):
        read_workload(path)


def test_a_csv_with_a_field_of_any_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text(f"{AZURE}2023-11-16 18:17:03,5,{'6' * 200_000}\n")
    with pytest.raises(InvalidRequest, match=r"request 0 of the workload .* is wrong"):
        read_workload(path)


def test_marks_and_separators_of_other_systems_are_read(tmp_path: Path) -> None:
    """The byte order mark of Windows's editors, its line ends, and U+2028, which a string of JSON may hold."""
    row = json.dumps({**ROW, "text": "a\u2028b\x85c"}, ensure_ascii=False)
    path = tmp_path / "t.jsonl"
    path.write_bytes(f"\ufeff{row}\r\n{row}\r\n".encode())
    assert len(read_workload(path)) == 2
    path = tmp_path / "t.csv"
    path.write_bytes(f"\ufeff{AZURE}2023-11-16 18:17:03,5,6\n".replace("\n", "\r\n").encode())
    assert read_workload(path).prompt_tokens.tolist() == [5]


def test_times_of_a_csv_do_not_depend_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Berlin the clocks went from 2 to 3 at night on 26 March 2023."""
    path = tmp_path / "night.csv"
    path.write_text(f"{AZURE}2023-03-26 01:30:00,5,6\n2023-03-26 03:30:00,5,6\n")
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        found = read_workload(path).start_s.tolist()
    finally:
        monkeypatch.undo()
        time.tzset()
    assert found == [0.0, 7200.0]


def test_a_name_longer_than_files_have_is_no_workload() -> None:
    with pytest.raises(InvalidRequest, match="is not a workload: known are"):
        named_workload("n" * 300, 1.0, None, "poisson", 1.0, 0)
