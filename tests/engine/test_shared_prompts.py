"""Engines that compute one prompt together give the tokens and the KV of one, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Sequence
from itertools import pairwise

import numpy as np
import pytest

from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest
from halfmoon.engine.scheduling.layer_gate import LayerGate
from halfmoon.engine.scheduling.restore_order import RestoreOrder
from halfmoon.kv.frame_plan import Written
from halfmoon.kv.kv_layout import KVSlice
from tests.engine.engine_runs import MakeEngine, prompt, request

BLOCK = 8
LENGTH = 203
NAME = "a"


class Together:
    """Owns the engines of one prompt, which are stepped one after the other: each layer is brought when it is needed.

    cuts: the blocks before which a segment begins, without the first; segment i belongs to engine `i % len(engines)`.
    """

    def __init__(self, engines: Sequence[Engine], cuts: Sequence[int], length: int = LENGTH) -> None:
        self.engines, self.length = engines, length
        num_blocks = -(-length // BLOCK)
        bounds = [0, *cuts, num_blocks]
        self.segments = [range(first, last) for first, last in pairwise(bounds)]
        self.written: list[list[Written | None]] = [[] for _ in engines]
        self.progress: list[tuple[int, int]] = []
        for number in range(len(engines)):
            self._add(number)

    def owner(self, segment: int) -> int:
        return segment % len(self.engines)

    def _add(self, number: int) -> None:
        own = [at for at in range(len(self.segments)) if self.owner(at) == number]
        foreign = [at for at in range(own[-1]) if self.owner(at) != number]
        awaited = self.segments[foreign[-1]].stop if foreign else 0
        order = RestoreOrder(
            awaited,
            0,
            lambda *progress: self.progress.append(progress),
            tuple(self.segments[at] for at in own if self.segments[at].start < awaited),
            layers_at_once=1,
        )
        tokens = prompt(self.length, self.length)[: self.segments[own[-1]].stop * BLOCK]
        sampling = request(length=4).sampling
        part = EngineRequest(NAME, tokens, sampling, prefill_only=True)
        self.engines[number].add(part, self.written[number].append, order)

    def bring(self, segment: int, to: int, layers: range) -> None:
        """Copies a segment's layers from its owner."""
        source = self.engines[self.owner(segment)]
        for block in self.segments[segment]:
            cells = source.kv_read(NAME, KVSlice(layers.start, layers.stop, block * BLOCK, BLOCK))
            self.engines[to].load_block(NAME, block, bytes(cells), layers)

    def compute(
        self, segment: int, gate: Callable[[Together, int, Sequence[int]], LayerGate], lost: Container[int] = ()
    ) -> list[int]:
        """Has its owner compute a segment while those before it arrive, and those of `lost` engines do not."""
        number = self.owner(segment)
        before = []
        for other in range(max(segment - len(self.engines) + 1, 0), segment):
            if self.owner(other) in lost:
                self.engines[number].note_loaded(NAME, (), self.segments[other])
            else:
                before.append(other)
        if before:
            self.engines[number].arrive_by_layer(NAME, gate(self, number, before))
        result = self.engines[number].step()
        self.engines[number].check_integrity()
        return [output.token_id for output in result.outputs]


class JustInTime(LayerGate):
    """Has each layer of some segments arrive when the step asks for it."""

    def __init__(self, of: Together, to: int, segments: Sequence[int]) -> None:
        self.of, self.to, self.segments = of, to, segments
        blocks = [block for segment in segments for block in of.segments[segment]]
        super().__init__(blocks, of.engines[to].layout.num_layers, 0.0)
        self.num_asked = 0

    def wait(self, layer: int) -> None:
        if layer < self.num_asked:  # another step, behind other segments of the run
            super().wait(layer)
            return
        assert self.num_asked == layer
        self.num_asked += 1
        for segment in self.segments:
            self.of.bring(segment, self.to, range(layer, layer + 1))
        self.arrived(layer + 1)
        super().wait(layer)


def alone(make_engine: MakeEngine, **options: object) -> tuple[Engine, int]:
    engine = make_engine(**options)
    engine.add(EngineRequest(NAME, prompt(LENGTH, LENGTH), request(length=4).sampling, prefill_only=True))
    while True:
        for output in engine.step().outputs:
            return engine, output.token_id


def content(engine: Engine, num_tokens: int = LENGTH) -> bytes:
    return bytes(engine.kv_read(NAME, KVSlice(0, engine.layout.num_layers, 0, num_tokens)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_engines", "cuts"),
    [(2, [13]), (3, [10, 18]), (2, [7, 13, 19]), (3, [5, 9, 13, 17, 21]), (2, [1, 25])],
    ids=["two", "three", "two in rounds", "three in rounds", "unequal"],
)
def test_segments_give_the_kv_and_the_token_of_one_engine(
    make_engine: MakeEngine, dtype: str, num_engines: int, cuts: list[int]
) -> None:
    expected, token = alone(make_engine, dtype=dtype)
    it = Together([make_engine(dtype=dtype) for _ in range(num_engines)], cuts)
    found: list[int] = []
    for segment in range(len(it.segments)):
        found = it.compute(segment, JustInTime)
        if it.owner(segment) == 0 and segment:
            assert it.engines[0].step().is_empty, "nothing more can be computed before the others' segments are here"
    assert found[-1:] == [token]
    last = it.engines[it.owner(len(it.segments) - 1)]
    assert content(last) == content(expected)


@pytest.mark.parametrize("seed", range(12))
def test_whoever_is_lost_the_others_give_the_kv_of_one_engine(make_engine: MakeEngine, seed: int) -> None:
    rng = random.Random(seed)
    num_engines, num_blocks = rng.randint(2, 4), -(-LENGTH // BLOCK)
    num_segments = num_engines * rng.randint(1, 3)
    expected, token = alone(make_engine)
    cuts = sorted(rng.sample(range(1, num_blocks), num_segments - 1))
    it = Together([make_engine(max_batch_tokens=rng.choice((64, 256))) for _ in range(num_engines)], cuts)
    lost: set[int] = set()
    found: list[int] = []
    for segment in range(num_segments):
        number = it.owner(segment)
        if number < num_engines - 1 and rng.random() < 0.2:
            lost.add(number)
        if number in lost:
            continue
        found += it.compute(segment, JustInTime, lost)
        engine, end = it.engines[number], it.segments[segment].stop * BLOCK
        while engine.find(NAME).num_computed < min(end, len(engine.find(NAME).request.prompt_token_ids)):
            result = engine.step()
            assert not result.is_empty, "it waits for what it is to compute"
            found += [output.token_id for output in result.outputs]
    assert found[-1:] == [token]
    assert content(it.engines[-1]) == content(expected)


def test_each_layer_is_reported_at_once_and_nothing_that_is_not_here(make_engine: MakeEngine) -> None:
    it = Together([make_engine(), make_engine()], [7, 13, 19])
    num_layers = it.engines[0].layout.num_layers
    it.compute(0, JustInTime)
    assert [one.num_layers for one in it.written[0] if one is not None and one.num_tokens == 0] == [1, 2, 3][
        :num_layers
    ]
    it.compute(1, JustInTime)
    (first, *_) = (one for one in it.written[1] if one is not None and one.num_layers)
    assert first.has(0, 7 * BLOCK, 13 * BLOCK)
    assert not first.has(0, 13 * BLOCK, 14 * BLOCK)
    assert not first.has(num_layers - 1, 7 * BLOCK, 8 * BLOCK)


def test_a_segment_that_is_given_up_is_computed_here(make_engine: MakeEngine) -> None:
    expected, token = alone(make_engine)
    it = Together([make_engine(), make_engine()], [7, 13, 19])
    last = it.engines[1]
    last.note_loaded(NAME, (), it.segments[0])
    assert not last.step().outputs, "it computes the first two segments, and the third is still awaited"
    it.compute(0, JustInTime)
    it.compute(2, JustInTime)
    it.bring(2, 1, range(last.layout.num_layers))
    last.note_loaded(NAME, it.segments[2])
    (output,) = last.step().outputs
    assert output.token_id == token
    np.testing.assert_allclose(
        np.frombuffer(content(last), np.float32), np.frombuffer(content(expected), np.float32), atol=1e-5
    )


def test_a_segment_is_computed_in_one_step_though_others_are_awaited(make_engine: MakeEngine) -> None:
    it = Together([make_engine(chunk_tokens=16), make_engine(chunk_tokens=16)], [7, 13, 19])
    assert it.engines[0].step().num_prefill_tokens == 7 * BLOCK


def test_a_request_that_got_its_blocks_late_is_told_so(make_engine: MakeEngine) -> None:
    """What it awaits is loaded only then."""
    engine = make_engine(num_blocks=30)
    engine.add(request("before", 200, prefill_only=True))
    engine.step()
    told: list[tuple[int, int]] = []
    engine.add(request("a", 100, prefill_only=True), order=RestoreOrder(12, 0, lambda *at: told.append(at)))
    engine.step()
    assert told == []
    engine.cancel("before")
    engine.step()
    assert told == [(0, 0)]
