"""Recorded decode steps: static buffers, padding and sizes with a capture that records nothing and runs on the CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfmoon.engine.attention.attention import SdpaBackend
from halfmoon.engine.attention.attention_backend import AttentionRule
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.chunk import Chunk
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.device_path import records_decodes
from halfmoon.engine.engine import Engine
from halfmoon.engine.kv_memory.kv_arena import KVArena
from halfmoon.engine.model_runner import ModelRunner
from halfmoon.engine.models import build_model
from halfmoon.engine.models.forward_batch import ForwardBatch
from halfmoon.engine.models.weights import load_weights
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.kv.kv_layout import KVLayout

pytest.importorskip("triton", reason="triton is missing (extra `gpu`)")
from tests.engine.kernels.conftest import HAS_GPU  # isort: skip  (chooses the interpreter where there is no GPU)
from halfmoon.engine.cuda_graphs import CudaCapture, DecodeGraphs, Replay  # isort: skip
from halfmoon.engine.models.triton_ops import TRITON_OPS  # isort: skip
from halfmoon.engine.attention.triton_attention import TritonBackend  # isort: skip

DEVICE = "cuda" if HAS_GPU else "cpu"
BLOCK_TOKENS = 8
NUM_BLOCKS = 16


class FakeCapture:
    """Replays by running again what was captured: over the same batch, as it was built then."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0

    def __call__(self, forward: Callable[[], Tensor]) -> Replay:
        forward()
        self.num_captures += 1

        def replay() -> Tensor:
            self.num_replays += 1
            return forward()

        return replay


class Rig:
    """A tiny model over an arena full of random numbers: what the sequences' past is does not matter."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.model_config
        self.model = build_model(config, torch.float32, DEVICE, TRITON_OPS)
        load_weights(self.model, checkpoint.weight_files)
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, "float32", BLOCK_TOKENS)
        self.arena = KVArena(layout, NUM_BLOCKS, DEVICE)
        self.arena.tensor.copy_(torch.randn(self.arena.tensor.shape, generator=torch.Generator().manual_seed(3)))
        self.attention = TritonBackend(BLOCK_TOKENS, config.num_kv_heads, 64, DEVICE)
        self.runner = ModelRunner(self.model, self.arena, self.attention, frozenset())

    def graphs(self, max_running: int) -> DecodeGraphs:
        capture = CudaCapture() if HAS_GPU else FakeCapture()
        with torch.inference_mode():
            return DecodeGraphs(partial(self.model.forward, kv=self.arena.tensor), self.attention, max_running, capture)

    def check(self, graphs: DecodeGraphs, chunks: Sequence[Chunk]) -> None:
        """The recorded step gives the logits of the eager one and changes the same slots."""
        before = self.arena.tensor.clone()
        expected = self.runner.forward(self.runner.batch(chunks))
        after = self.arena.tensor.clone()
        self.arena.tensor.copy_(before)
        assert graphs.fits(chunks)
        with torch.inference_mode():
            got = graphs.run(chunks)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(self.arena.tensor, after, atol=1e-5, rtol=1e-5)


@pytest.fixture
def rig(tiny_checkpoint: Callable[[str], Checkpoint]) -> Rig:
    return Rig(tiny_checkpoint("llama"))


def decode(token_id: int, start: int, *blocks: int) -> Chunk:
    return Chunk([token_id], start, blocks, num_logits=1)


ROWS = (
    decode(5, 0, 3),
    decode(6, 7, 4),
    decode(7, 8, 9, 1),
    decode(8, 30, 2, 8, 0, 5),
    decode(9, 62, 12, 6, 7, 15, 10, 14, 11, 13),  # as long as a sequence can be
)


def test_recorded_steps_are_eager_steps_whatever_ran_before(rig: Rig) -> None:
    graphs = rig.graphs(max_running=4)
    for rows in (ROWS[1:], ROWS[:1], ROWS[:3]):
        rig.check(graphs, rows)


def test_recording_stores_nothing(rig: Rig) -> None:
    before = rig.arena.tensor.clone()
    rig.graphs(max_running=2)
    assert torch.equal(rig.arena.tensor, before)


@pytest.mark.parametrize(("max_running", "largest"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_sizes_are_powers_of_two_up_to_the_running(rig: Rig, max_running: int, largest: int) -> None:
    graphs = rig.graphs(max_running)
    assert graphs.fits(ROWS[:max_running])
    assert not graphs.fits(ROWS[: largest + 1])
    assert not graphs.fits(())


def test_one_graph_a_size(rig: Rig) -> None:
    capture = FakeCapture()
    with torch.inference_mode():
        DecodeGraphs(partial(rig.model.forward, kv=rig.arena.tensor), rig.attention, 4, capture)
    assert capture.num_captures == 3


def test_an_engine_decodes_through_them(make_engine: Callable[..., Engine]) -> None:
    options = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    requests = [EngineRequest(name, tuple(range(3, 3 + length)), options) for name, length in (("a", 9), ("b", 4))]
    tokens = []
    capture = FakeCapture()
    for attention in ("sdpa", "triton"):
        engine = make_engine("qwen3", attention=attention, device=DEVICE, max_running=2, cuda_graphs=False)
        runner = engine._runner
        assert isinstance(runner, ModelRunner)
        if isinstance(runner._attention, TritonBackend):
            with torch.inference_mode():
                forward = partial(runner._model.forward, kv=runner._arena.tensor)
                runner._recorded = DecodeGraphs(forward, runner._attention, 2, capture)
        for one in requests:
            engine.add(one)
        results = []
        while engine.has_work():
            results.append(engine.step())
        tokens.append(sorted((out.request_id, out.position, out.token_id) for done in results for out in done.outputs))
    assert tokens[0] == tokens[1]
    assert capture.num_replays == 4


def test_what_a_graph_reads_outlives_its_recording(rig: Rig) -> None:
    """A graph keeps addresses, not tensors: memory that is freed after the recording is soon another's."""
    read: list[weakref.ref[Tensor]] = []

    def forward(batch: ForwardBatch) -> Tensor:
        read.extend(weakref.ref(tensor) for tensor in (batch.token_ids, batch.positions, batch.logit_rows))
        return rig.model.forward(batch, kv=rig.arena.tensor)

    def capture(recorded: Callable[[], Tensor]) -> Replay:
        logits = recorded()
        return lambda: logits

    with torch.inference_mode():
        graphs = DecodeGraphs(forward, rig.attention, 4, capture)
    gc.collect()
    assert len(read) == 9
    assert all(tensor() is not None for tensor in read)
    assert graphs.fits(ROWS[:1])


class Readings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a recording would refuse: operations whose outcome, or its shape, the host reads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_read = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        if is_read and not (func is torch.ops.aten.index.Tensor and all(one.dtype == torch.int64 for one in args[1])):
            self.num += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama-tied-biased", "qwen3", "gemma2", "opt", "mixtral", "qwen2-moe", "deepseek-v2"])
def test_only_what_reads_nothing_back_is_recorded(name: str, tiny_checkpoint: Callable[[str], Checkpoint]) -> None:
    checkpoint = tiny_checkpoint(name)
    config = checkpoint.model_config
    model = build_model(config, torch.float32, "cpu")
    load_weights(model, checkpoint.weight_files)
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, "float32", BLOCK_TOKENS)
    arena = KVArena(layout, NUM_BLOCKS, "cpu")
    runner = ModelRunner(model, arena, SdpaBackend(BLOCK_TOKENS, "cpu"), frozenset())
    batch = replace(runner.batch(ROWS[:3]), attention=NoAttention())
    with torch.inference_mode(), Readings() as readings:
        model.forward(batch, arena.tensor)
    assert records_decodes(EngineConfig(device="cuda", attention="triton"), config) is (readings.num == 0)
    assert not records_decodes(EngineConfig(device="cuda", attention="triton", cuda_graphs=False), config)


class NoAttention:
    """Back ends have tests of their own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, rule: AttentionRule) -> Tensor:
        return q.new_zeros(q.shape[0], q.shape[1] * rule.out_size(q.shape[2]))


def test_one_stream_records_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace for each stream on which it ever multiplied."""
    streams: list[FakeStream] = []
    used: list[object] = []

    class FakeStream:
        def __init__(self) -> None:
            streams.append(self)

        def wait_stream(self, other: object) -> None: ...

    def on(stream: object) -> AbstractContextManager[None]:
        used.append(stream)
        return nullcontext()

    def record(graph: object, pool: object, stream: object, capture_error_mode: str) -> AbstractContextManager[None]:
        return on(stream)

    for name, fake in {
        "graph_pool_handle": object,
        "Stream": FakeStream,
        "current_stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
        "stream": on,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": record,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    capture = CudaCapture()
    replays = [capture(lambda number=number: torch.tensor(number)) for number in range(3)]  # type: ignore[misc]
    assert [int(replay()) for replay in replays] == [0, 1, 2]
    assert used == streams * 6


def test_other_steps_are_left_to_the_runner(rig: Rig) -> None:
    graphs = rig.graphs(max_running=4)
    assert not graphs.fits((ROWS[0], Chunk([1, 2], 3, (1,), num_logits=1)))
    assert not graphs.fits((ROWS[0], Chunk([1], 3, (1,), num_logits=0)))
