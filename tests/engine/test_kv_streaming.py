"""KV that leaves while the rest computes: each layer as soon as it is written, never earlier, right if preempted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from halfmoon.engine.attention.watched_attention import WatchedAttention
from halfmoon.engine.engine import Engine
from halfmoon.engine.kv_memory.kv_access import NotWritten
from halfmoon.engine.kv_memory.kv_watch import LayerWatch
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.errors import NotFound
from halfmoon.kv.frame_plan import Written
from halfmoon.kv.kv_layout import KVSlice

MakeEngine = Callable[..., Engine]
NUM_LAYERS = 3


def request(name: str = "a", length: int = 20, max_tokens: int = 12, **options: Any) -> EngineRequest:
    prompt = torch.randint(3, 199, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(name, tuple(prompt), sampling, **options)


def finish(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step().outputs:
            tokens.setdefault(output.request_id, []).append(output.token_id)
        engine.check_integrity()
    return tokens


def every_layer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny layers are not worth a word each, unless a test says so."""
    monkeypatch.setattr(engine._kv_watch, "_frame_layers", lambda num_tokens: 1)


class Copier:
    """Hands a request's KV to a target engine piece by piece, on the engine's thread, the moment it is told of it."""

    def __init__(self, source: Engine, target: Engine, one: EngineRequest) -> None:
        self.source, self.target, self.name = source, target, one.request_id
        self.sent = [0] * NUM_LAYERS
        self.heard: list[Written | None] = []
        target.reserve(one)
        source.add(EngineRequest(one.request_id, one.prompt_token_ids, one.sampling, prefill_only=True), self.on_kv)

    def on_kv(self, written: Written | None) -> None:
        self.heard.append(written)
        if written is None:
            return
        for layer in range(NUM_LAYERS):
            start, end = self.sent[layer], written.num_tokens_of(layer)
            if end > start:
                part = KVSlice(layer, layer + 1, start, end - start)
                self.target.kv_write(self.name, part, self.source.kv_read(self.name, part))
                self.sent[layer] = end


@pytest.mark.parametrize("chunk", [64, 7])
def test_layers_are_told_in_order_and_what_they_hold_is_final(
    chunk: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = finish_one(make_engine(), request(length=20))
    source, target = make_engine(max_batch_tokens=chunk, max_running=2), make_engine()
    every_layer(source, monkeypatch)
    copier = Copier(source, target, request(length=20))
    (first,) = finish(source)["a"]
    ends = [*range(chunk, 20, chunk), 20]
    told = []
    for start, end in zip((0, *ends), ends, strict=False):
        told += [Written(start, end, layers) for layers in (1, 2, 3)] + [Written(end)]
    assert copier.heard == told
    source.cancel("a")
    assert copier.heard[-1] is None
    target.start("a", first)
    assert [first, *finish(target)["a"]] == expected


def finish_one(engine: Engine, one: EngineRequest) -> list[int]:
    engine.add(one)
    return finish(engine)[one.request_id]


def test_what_is_not_written_yet_cannot_be_read(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(max_batch_tokens=10, max_running=2)
    every_layer(engine, monkeypatch)
    refused: list[tuple[int, int]] = []

    def try_beyond(written: Written | None) -> None:
        if written is None:
            return
        for layer in range(NUM_LAYERS):
            end = written.num_tokens_of(layer)
            if end:
                engine.kv_read("a", KVSlice(layer, layer + 1, 0, end))
            if end < 25:
                with pytest.raises(NotWritten):
                    engine.kv_read("a", KVSlice(layer, layer + 1, 0, end + 1))
                refused.append((layer, end))

    engine.add(request(length=25, prefill_only=True), try_beyond)
    with pytest.raises(NotWritten):
        engine.kv_read("a", KVSlice(0, 1, 0, 1))
    finish(engine)
    assert {(2, 0), (2, 10), (1, 20), (0, 10)} <= set(refused)
    assert len(engine.kv_read("a", KVSlice(0, 3, 0, 25))) == 25 * engine.layout.token_bytes


def test_a_cached_prefix_is_told_before_anything_is_computed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make_engine(), make_engine()
    expected = finish_one(source, request(length=20))
    every_layer(source, monkeypatch)
    copier = Copier(source, target, request(length=20))
    (first,) = finish(source)["a"]
    assert copier.heard[:2] == [Written(19), Written(19, 20, 1)]
    target.start("a", first)
    assert [first, *finish(target)["a"]] == expected


def test_a_listener_costs_others_nothing(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    monkeypatch.setattr(WatchedAttention, "stored", None)
    engine.add(request("nobody listens", prefill_only=True))
    engine.add(request("decodes"))
    assert len(finish(engine)["decodes"]) == 12


def test_few_layers_are_told_as_the_end_comes_near(make_engine: MakeEngine) -> None:
    heard: list[Written | None] = []
    engine = make_engine()
    engine.add(request(length=20, prefill_only=True), heard.append)
    finish(engine)
    assert heard == [*(Written(0, 20, layers) for layers in (1, 2, 3)), Written(20)]


@pytest.mark.parametrize(
    ("every", "num_layers", "told"), [(1, 3, [1, 2, 3]), (3, 7, [3, 5, 6, 7]), (9, 6, [2, 4, 5, 6])]
)
def test_layers_are_told_in_groups(every: int, num_layers: int, told: list[int]) -> None:
    class Inner:
        def attend(self, *args: Any) -> Any:
            return args

    heard: list[int] = []
    attention: Any = WatchedAttention(Inner(), num_layers, LayerWatch(every, heard.append))
    for layer in range(num_layers):
        assert attention.attend(layer, "k", "v", "kv", 0.5) == (layer, "k", "v", "kv", 0.5)
    assert heard == told


def test_a_preempted_prompt_is_read_again_only_once_it_is_computed_again(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = finish_one(make_engine(), request("moved", 40))
    source = make_engine(num_blocks=7, prefix_cache=False, max_batch_tokens=9, chunk_tokens=8, max_running=4)
    target = make_engine()
    every_layer(source, monkeypatch)
    source.add(request("grows", 12, max_tokens=20, priority=-1))
    assert source.step().num_prefill_tokens == 9
    copier = Copier(source, target, request("moved", 40))
    num_preempted = 0
    first: list[int] = []
    while not first:
        result = source.step()
        first = [output.token_id for output in result.outputs if output.request_id == "moved"]
        num_preempted += result.num_preempted
        if result.num_preempted:
            with pytest.raises(NotWritten):
                source.kv_read("moved", KVSlice(0, 1, 0, 1))
            preempted_at = list(copier.sent)
        source.check_integrity()
    assert num_preempted
    assert any(preempted_at)
    assert copier.sent == [40] * NUM_LAYERS
    target.start("moved", first[0])
    assert [*first, *finish(target)["moved"]] == expected


@pytest.mark.parametrize("end", ["cancel", "preempt"])
def test_a_copy_of_a_running_prompt_ends_before_its_blocks_are_given_back(
    end: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(num_blocks=7, prefix_cache=False, max_batch_tokens=9, chunk_tokens=8, max_running=4)
    engine.add(request("grows", 12, max_tokens=20, priority=-1))
    engine.add(request("moved", 40, prefill_only=True))
    for _ in range(4):
        engine.step()
    sequence = engine._sequences["moved"]
    assert sequence.written.num_tokens > 8
    inside, go_on = threading.Event(), threading.Event()
    read = engine._kv._memory.read
    copied: list[tuple[bytes, bytes]] = []

    def slow_read(blocks: Any, *where: Any) -> memoryview:
        before = bytes(read(blocks, *where))
        inside.set()
        go_on.wait(20)
        copied.append((before, bytes(read(blocks, *where))))
        return memoryview(before)

    monkeypatch.setattr(engine._kv._memory, "read", slow_read)
    reader = threading.Thread(target=engine.kv_read, args=("moved", KVSlice(0, 3, 0, 8)))
    reader.start()
    assert inside.wait(20)
    freed = threading.Event()

    def free() -> None:
        if end == "cancel":
            engine.cancel("moved")
        else:
            while not engine.step().num_preempted:
                pass
        freed.set()

    freeing = threading.Thread(target=free)
    freeing.start()
    while not sequence.kv_lock.locked():
        pass
    assert not freed.is_set()
    go_on.set()
    for thread in (reader, freeing):
        thread.join(20)
    assert freed.is_set()
    ((before, after),) = copied
    assert before == after
    with pytest.raises(NotFound):
        engine.kv_read("moved", KVSlice(0, 3, 0, 8))
    engine.cancel_all()
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.num_blocks


def test_listeners_hear_of_a_cancellation_and_leave_failures_to_the_output(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    heard: dict[str, list[Written | None]] = {"cancelled": [], "failed": []}
    engine.add(request("cancelled", prefill_only=True), heard["cancelled"].append)
    engine.cancel("cancelled")
    engine.add(request("failed", prefill_only=True), heard["failed"].append)

    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine._runner, "run", broken)
    assert engine.step().outputs[0].finish_reason == "error"
    assert heard == {"cancelled": [None], "failed": []}


def test_kv_is_gathered_into_the_memory_that_is_given(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(request(length=20, prefill_only=True))
    finish(engine)
    staging = bytearray(20 * engine.layout.token_bytes + 7)
    got = engine.kv_read("a", KVSlice(1, 3, 3, 14), memoryview(staging))
    assert bytes(got) == bytes(engine.kv_read("a", KVSlice(1, 3, 3, 14))) == bytes(staging[: got.nbytes])
    staging[0] ^= 1
    assert got[0] == staging[0]
