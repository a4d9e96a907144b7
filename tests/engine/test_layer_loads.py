"""A step that computes what follows a prefix while the prefix's layers arrive: the tokens of computing it all."""

from __future__ import annotations

import numpy as np
import pytest

from halfmoon.engine.engine import Engine
from halfmoon.engine.scheduling.layer_gate import LayerGate, LayerLate
from halfmoon.engine.scheduling.restore_order import RestoreOrder
from halfmoon.errors import NotFound
from halfmoon.kv.frame_plan import Written
from halfmoon.kv.kv_layout import KVSlice
from tests.engine.engine_runs import MakeEngine, finish, request

BLOCK = 4
LENGTH = 46
NUM_BLOCKS = LENGTH // BLOCK
BLOCKS = range(NUM_BLOCKS)


class Arriving:
    """A request whose blocks `by_layer` arrive only when the step waits for their layers; others are loaded before.

    What has not arrived is NaN, so that a step which reads it samples something else.
    """

    def __init__(
        self, make_engine: MakeEngine, source: Engine, fence: int, num_by_layer: int, length: int = LENGTH
    ) -> None:
        """source: has computed the request."""
        self.num_layers = source.layout.num_layers
        whole = range(self.num_layers)
        self.cells = {
            (block, layer): bytes(source.kv_read("a", KVSlice(layer, layer + 1, block * BLOCK, BLOCK)))
            for block in BLOCKS
            for layer in whole
        }
        self.by_layer = range(fence, fence + num_by_layer)
        self.engine = make_engine(block_tokens=BLOCK, num_blocks=40)
        self.written: list[Written | None] = []
        self.engine.add(
            request(length=length, prefill_only=True),
            on_kv=self.written.append,
            order=RestoreOrder(NUM_BLOCKS, fence, lambda *_: None),
        )
        poison = np.full(source.layout.block_bytes // 4, np.nan, np.float32).tobytes()
        for block in range(fence, NUM_BLOCKS):
            self.engine.load_block("a", block, poison)
        for block in range(fence + num_by_layer, NUM_BLOCKS):
            for layer in whole:
                self.load(block, layer)
        self.engine.note_loaded("a", range(fence + num_by_layer, NUM_BLOCKS))

    def load(self, block: int, layer: int) -> None:
        self.engine.load_block("a", block, self.cells[block, layer], range(layer, layer + 1))

    def load_layer(self, layer: int) -> None:
        for block in self.by_layer:
            self.load(block, layer)


class JustInTime(LayerGate):
    """Has each layer arrive when the step asks for it, up to the one at which its source dies."""

    def __init__(self, arriving: Arriving, dies_at: int | None = None) -> None:
        super().__init__(arriving.by_layer, arriving.num_layers, 0.0)
        self.num_asked = 0
        self._arriving = arriving
        self._dies_at = dies_at

    def wait(self, layer: int) -> None:
        assert self.num_asked == layer
        self.num_asked += 1
        if layer == self._dies_at:
            self.fail()
        else:
            self._arriving.load_layer(layer)
            self.arrived(layer + 1)
        super().wait(layer)


def finish_one(engine: Engine) -> list[int]:
    found: list[int] = []
    for _ in range(20):
        result = engine.step()
        engine.check_integrity()
        found += [output.token_id for output in result.outputs]
        if result.is_empty:
            break
    return found


def content(engine: Engine, num_tokens: int = LENGTH) -> np.ndarray:
    return np.frombuffer(engine.kv_read("a", KVSlice(0, engine.layout.num_layers, 0, num_tokens)), np.float32)


def compute(make_engine: MakeEngine, length: int) -> tuple[Engine, int]:
    """An engine that has computed the request, and the token that it sampled."""
    engine = make_engine(block_tokens=BLOCK, num_blocks=32)
    engine.add(request(length=length, prefill_only=True))
    (token,) = finish_one(engine)
    return engine, token


@pytest.fixture
def computed(make_engine: MakeEngine) -> tuple[Engine, int]:
    return compute(make_engine, LENGTH)


@pytest.mark.parametrize("fence", BLOCKS)
def test_every_split_samples_what_computing_samples(
    make_engine: MakeEngine, computed: tuple[Engine, int], fence: int
) -> None:
    expected, token = computed
    for num_by_layer in range(1, NUM_BLOCKS - fence + 1):
        it = Arriving(make_engine, expected, fence, num_by_layer)
        assert finish_one(it.engine) == [], "it waits for its blocks"
        gate = JustInTime(it)
        it.engine.arrive_by_layer("a", gate)
        assert finish_one(it.engine) == [token]
        assert gate.num_asked == it.num_layers
        np.testing.assert_allclose(content(it.engine), content(expected), atol=1e-5)
        it.engine.add(request("b", LENGTH))
        result = it.engine.step()
        assert result.num_cached_tokens == {"b": LENGTH - 1}, "what arrived is cached like what is loaded"


def test_a_prompt_longer_than_a_step_waits_in_its_first_chunk_only(make_engine: MakeEngine) -> None:
    source, token = compute(make_engine, 80)
    it = Arriving(lambda **options: make_engine(**options, max_batch_tokens=16), source, 2, 9, 80)
    finish_one(it.engine)
    it.engine.arrive_by_layer("a", gate := JustInTime(it))
    first = it.engine.step()
    assert (first.num_prefill_tokens, gate.num_asked) == (16, it.num_layers)
    assert finish_one(it.engine) == [token]


@pytest.mark.parametrize("dies_at", [0, 1])
@pytest.mark.parametrize("fence", [0, 3])
def test_a_source_that_dies_in_the_middle_costs_no_token(
    make_engine: MakeEngine, computed: tuple[Engine, int], dies_at: int, fence: int
) -> None:
    it = Arriving(make_engine, computed[0], fence, 6)
    finish_one(it.engine)
    it.engine.arrive_by_layer("a", JustInTime(it, dies_at))
    assert finish_one(it.engine) == [], "the step is given up"
    it.engine.add(request("b", LENGTH))
    assert it.engine.step().num_cached_tokens == {"b": fence * BLOCK}, "a half-loaded block is not held"
    with pytest.raises(NotFound):
        it.engine.kv_read("a", KVSlice(0, 1, fence * BLOCK, BLOCK))
    it.engine.note_loaded("a", (), range(NUM_BLOCKS))
    finish(it.engine)
    np.testing.assert_allclose(content(it.engine), content(computed[0]), atol=1e-5)


def test_layers_that_are_late_are_awaited_as_blocks(make_engine: MakeEngine, computed: tuple[Engine, int]) -> None:
    it = Arriving(make_engine, computed[0], 2, 9)
    finish_one(it.engine)
    it.engine.arrive_by_layer("a", gate := LayerGate(it.by_layer, it.num_layers, patience_s=0.0))
    it.load_layer(0)
    gate.arrived(1)
    assert finish_one(it.engine) == []
    assert not gate.is_open
    for layer in range(1, it.num_layers):
        it.load_layer(layer)
    it.engine.note_loaded("a", BLOCKS)
    assert len(finish_one(it.engine)) == 1
    np.testing.assert_allclose(content(it.engine), content(computed[0]), atol=1e-5)


def test_a_step_that_waits_holds_nobody_else(make_engine: MakeEngine, computed: tuple[Engine, int]) -> None:
    it = Arriving(make_engine, computed[0], 2, 9)
    it.engine.add(request("decoding", 9, max_tokens=3))
    it.engine.step()
    it.engine.arrive_by_layer("a", gate := JustInTime(it))
    it.engine.add(request("new", 20))
    scheduled = []
    while gate.num_asked == 0:
        begun = it.engine.begin_step()
        scheduled.append({item.sequence.request_id for item in begun.schedule.scheduled})
        sampled = it.engine._runner.run(begun.schedule.scheduled, begun.watch)
        it.engine.end_step(begun, sampled)
    assert scheduled[-1] == {"a"}, "it runs alone"
    assert all("a" not in step for step in scheduled[:-1] if "decoding" in step)


def test_a_listener_hears_of_arrived_layers_as_of_computed_ones(
    make_engine: MakeEngine, computed: tuple[Engine, int]
) -> None:
    it = Arriving(make_engine, computed[0], 2, 3)
    finish_one(it.engine)
    it.written.clear()
    it.engine.arrive_by_layer("a", JustInTime(it))
    finish_one(it.engine)
    loaded = ((5 * BLOCK, NUM_BLOCKS * BLOCK),)
    assert it.written[0] == Written(2 * BLOCK, LENGTH, 1, loaded)
    assert it.written[-1] == Written(LENGTH)


def test_patience_is_for_all_waits_together() -> None:
    gate = LayerGate([0], 3, patience_s=0.0)
    gate.arrived(1)
    gate.wait(0)
    with pytest.raises(LayerLate):
        gate.wait(1)
    gate.arrived(3)
    gate.wait(2)
    assert not gate.is_open
    whole = LayerGate([0], 1, 0.0)
    whole.arrived(1)
    whole.fail()
    assert whole.is_open, "all layers are here: nothing is missing"
