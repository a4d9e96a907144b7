"""Loads by layer under 10,000 random schedules: no step reads what is not there, and every prompt is computed."""

from __future__ import annotations

import random

import pytest

from halfmoon.engine.engine_core import EngineCore, Step
from halfmoon.engine.request import EngineRequest, SampledToken, SamplingParams
from halfmoon.engine.request_check import RequestLimits
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.layer_gate import LayerGate, LayerLate
from halfmoon.engine.scheduling.restore_order import RestoreOrder
from halfmoon.engine.scheduling.schedule import ScheduledSequence, SchedulerLimits
from halfmoon.kv.kv_layout import KVLayout

NUM_SCHEDULES = 10_000
PARTS = 5
BLOCK, NUM_LAYERS = 4, 3
MOST_ROUNDS = 200


class Schedule:
    """Prompts that load a part of their prefix, from sources that do whatever may happen, in a drawn order.

    `cells` has, for each request, block and layer that was written, whether it is right.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num = rng.randrange(1, 7)
        limits = RequestLimits(10, 1024, 64, KVLayout(NUM_LAYERS, 1, 1, "float16", BLOCK))
        step_limits = SchedulerLimits(rng.choice((6, 64)), 4, 4)
        self.core = EngineCore(BlockPool(64), limits, step_limits, None, lambda one: one.finish_reason(frozenset()))
        self.cells: dict[tuple[str, int, int], bool] = {}
        self.done: set[str] = set()
        self.names = ["a", "b"][: rng.randrange(1, 3)]
        self.gates: dict[str, LayerGate] = {}
        self.loaded: dict[str, list[int]] = {}  # arrived by layer, to be noted before the next step
        self.num_here = dict.fromkeys(self.names, 0)  # layers at each gate
        for name in self.names:
            prompt = tuple(rng.choices(range(10), k=self.num * BLOCK + rng.randrange(1, 9)))
            request = EngineRequest(name, prompt, SamplingParams(1), prefill_only=True)
            self.core.add(request, order=RestoreOrder(self.num, rng.randrange(self.num), lambda *_: None))
        if rng.random() < 0.5:
            self.core.add(EngineRequest("other", (1,) * 5, SamplingParams(4)))
            self.names.append("other")

    def run(self) -> None:
        for number in range(MOST_ROUNDS):
            if len(self.done) == len(self.names):
                return
            for name in self.gates.keys() | set(self.num_here):
                self._event(name, is_orderly=number > 40)
            for name in list(self.loaded):
                self.core.note_loaded(name, self.loaded.pop(name))
            self._step()
            self.core.check_integrity()
        raise AssertionError("it never ends")

    def _event(self, name: str, *, is_orderly: bool) -> None:
        """A block or a layer arrives, a source dies, the fence moves, or nothing happens."""
        sequence = self.core._sequences.get(name)
        if sequence is None or sequence.restore is None:
            return
        awaited = [block for block in range(self.num) if sequence.restore.is_waited_for(block)]
        kind = self.rng.choice(("block", "gate", "layer", "layer", "die", "give up", "fence", "nothing"))
        if is_orderly:
            self._die(name)
            self.core.note_loaded(name, (), range(self.num))
        elif kind == "block" and awaited and name not in self.gates:
            block = self.rng.choice(awaited)
            self.cells.update({(name, block, layer): True for layer in range(NUM_LAYERS)})
            self.core.note_loaded(name, [block])
        elif kind == "gate" and awaited and name not in self.gates:
            for block in awaited:  # what was there before is somebody else's
                self.cells.update({(name, block, layer): False for layer in range(NUM_LAYERS)})
            self.gates[name] = LayerGate(awaited, NUM_LAYERS, 0.0)
            self.num_here[name] = 0
            self.core.arrive_by_layer(name, self.gates[name])
        elif kind == "layer" and name in self.gates:
            self._layer(name, awaited)
        elif kind == "die":
            self._die(name)
        elif kind == "give up" and awaited:
            self._die(name)
            self.core.note_loaded(name, (), self.rng.sample(awaited, 1))
        elif kind == "fence":
            self.core.move_fence(name, self.rng.randrange(self.num + 1))

    def _layer(self, name: str, awaited: list[int]) -> None:
        """The next layer arrives. A block that is no longer awaited is refused, which ends the load."""
        gate, layer = self.gates[name], self.num_here[name]
        if not gate.blocks.issubset(awaited):
            self._die(name)
            return
        for block in gate.blocks:
            self.cells[name, block, layer] = True
        self.num_here[name] = layer + 1
        gate.arrived(layer + 1)
        if layer + 1 == NUM_LAYERS:
            del self.gates[name]
            self.loaded[name] = sorted(gate.blocks)

    def _die(self, name: str) -> None:
        gate = self.gates.pop(name, None)
        if gate is not None:
            gate.fail()

    def _step(self) -> None:
        step = self.core.begin_step()
        items = step.schedule.scheduled
        gated = [item for item in items if item.gate is not None]
        assert not gated or len(items) == 1, "a step that waits holds somebody up"
        try:
            for layer in range(NUM_LAYERS):
                for item in items:
                    self._attend(item, layer)
        except LayerLate:
            self.core.give_up_step(step)
            return
        self._end(step)

    def _attend(self, item: ScheduledSequence, layer: int) -> None:
        name = item.sequence.request_id
        if item.gate is not None:
            sequence = item.sequence
            if self.rng.random() < 0.8 and self.num_here[name] == layer and name in self.gates:
                assert sequence.restore is not None
                self._layer(name, [block for block in range(self.num) if sequence.restore.is_waited_for(block)])
            item.gate.wait(layer)
        for position in range(item.start, item.start + item.num_tokens):
            self.cells.setdefault((name, position // BLOCK, layer), True)
            if position % BLOCK == 0:
                self.cells[name, position // BLOCK, layer] = True  # computed from its first token on
        for block in range((item.start + item.num_tokens - 1) // BLOCK + 1):
            assert self.cells.get((name, block, layer)), f"layer {layer} of block {block} is read and is not there"

    def _end(self, step: Step) -> None:
        tokens = [SampledToken(1) for item in step.schedule.scheduled if item.samples]
        for output in self.core.end_step(step, tokens).outputs:
            if output.request_id != "other" or output.finish_reason:
                self.done.add(output.request_id)
        for name in self.done & set(self.gates):
            del self.gates[name]


@pytest.mark.parametrize("part", range(PARTS))
def test_no_step_reads_what_is_not_there(part: int) -> None:
    for number in range(NUM_SCHEDULES // PARTS):
        seed = part * NUM_SCHEDULES + number
        try:
            Schedule(random.Random(seed)).run()
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
