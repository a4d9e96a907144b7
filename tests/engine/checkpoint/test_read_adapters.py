"""Adapters are read by name; what is not one is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfmoon.engine.checkpoint.adapters import read_adapters
from halfmoon.errors import InvalidRequest, UnknownModel


def adapter(path: Path, weights: bytes = b"w", **config: object) -> Path:
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"r": 4, **config}))
    (path / "adapter_model.safetensors").write_bytes(weights)
    return path


def test_equal_files_have_equal_fingerprints(tmp_path: Path) -> None:
    paths = [
        adapter(tmp_path / "a"),
        adapter(tmp_path / "b"),
        adapter(tmp_path / "c", b"x"),
        adapter(tmp_path / "d", rank_pattern={"q_proj": 9}),
    ]
    found = read_adapters([f"{path.name}={path}" for path in paths])
    assert [one.name for one in found] == ["a", "b", "c", "d"]
    assert [one.rank for one in found] == [4, 4, 4, 9]
    assert len({one.fingerprint for one in found}) == 3
    assert found[0].fingerprint == found[1].fingerprint
    assert len(bytes.fromhex(found[0].fingerprint)) == 16


@pytest.mark.parametrize(
    ("written", "error", "says"),
    [
        (["a"], InvalidRequest, "NAME=PATH"),
        (["=p"], InvalidRequest, "NAME=PATH"),
        (["a={}/a", "a={}/a"], InvalidRequest, "two adapters named 'a'"),
        (["a={}/none"], UnknownModel, "adapter_config.json"),
        (["a={}/" + 300 * "x"], UnknownModel, "adapter_config.json"),
        (["a={}/broken"], InvalidRequest, "no rank above 0"),
    ],
)
def test_what_is_no_adapter_is_refused(tmp_path: Path, written: list[str], error: type[Exception], says: str) -> None:
    adapter(tmp_path / "a")
    adapter(tmp_path / "broken", r=0)
    with pytest.raises(error, match=says):
        read_adapters([text.format(tmp_path) for text in written])


@pytest.mark.parametrize("rank", [None, True, False, 0, -1, 1.5, "4", "", [], [4], {}, {"q_proj": 4}])
def test_a_rank_that_is_none_is_named(tmp_path: Path, rank: object) -> None:
    path = adapter(tmp_path / "a", r=rank)
    with pytest.raises(InvalidRequest, match=r"adapter_config.json has no rank above 0 in r, but"):
        read_adapters([f"a={path}"])
    other = adapter(tmp_path / "b", rank_pattern={"k_proj": 2, "q_proj": rank})
    with pytest.raises(InvalidRequest, match=r"has no rank above 0 in rank_pattern.q_proj, but"):
        read_adapters([f"b={other}"])


@pytest.mark.parametrize("pattern", [True, False, 0, 4, -1.5, "", "q_proj", [], [4], [{"q_proj": 4}]])
def test_a_rank_pattern_is_an_object(tmp_path: Path, pattern: object) -> None:
    path = adapter(tmp_path / "a", rank_pattern=pattern)
    with pytest.raises(InvalidRequest, match=r"adapter_config.json: rank_pattern must be an object .* got"):
        read_adapters([f"a={path}"])
