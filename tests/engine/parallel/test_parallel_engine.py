"""Several ranks are one engine: the same tokens, the same KV bytes, one life and one death."""

from __future__ import annotations

import asyncio
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from halfmoon.engine.async_engine import AsyncEngine
from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.config import EngineConfig, OffloadConfig, OffloadSchedule
from halfmoon.engine.engine import Engine
from halfmoon.engine.parallel.messages import ReadKV
from halfmoon.engine.request import ERROR_TOKEN_ID, EngineRequest, SamplingParams, TokenLogprobs, TokenOutput
from halfmoon.errors import Incompatible, InvalidRequest, ServiceFailed
from halfmoon.kv.codec import Codec, decode
from halfmoon.kv.frame_plan import Written
from halfmoon.kv.kv_layout import KVDtype, KVSlice

T = TypeVar("T")
StartEngine = Callable[..., Engine]
PATIENCE_S = 30.0  # for what a machine under load must do at last; nothing waits that long when all is well

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="waits for processes by pidfd")


def request(name: str, length: int, max_tokens: int = 10, **options: Any) -> EngineRequest:
    prompt = torch.randint(3, 199, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(name, tuple(prompt), sampling, **options)


def requests() -> list[EngineRequest]:
    return [request(f"r{length}", length) for length in (1, 8, 19, 40, 100)]


def finish(engine: Engine) -> dict[str, list[int]]:
    """Tokens by request until no work is left."""
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step().outputs:
            tokens.setdefault(output.request_id, []).append(output.token_id)
        engine.check_integrity()
    return tokens


def generate(engine: Engine, *wanted: EngineRequest) -> dict[str, list[int]]:
    for one in wanted:
        engine.add(one)
    return finish(engine)


def followers(engine: Engine) -> Any:
    runner: Any = engine._runner
    return runner._followers


def pid(engine: Engine, rank: int) -> int:
    found: int = followers(engine).by_rank[rank].process.pid
    return found


@contextmanager
def stopped(process: int) -> Iterator[None]:
    """A child that does nothing, as if the machine had no time for it, while the block runs."""
    os.kill(process, signal.SIGSTOP)
    os.waitid(os.P_PID, process, os.WSTOPPED)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def in_time(call: Callable[[], T]) -> T:
    """`call()`, in a thread: an exchange that waits for ever would not hear a signal."""
    results: queue.SimpleQueue[T] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: results.put(call()), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return results.get_nowait()


def wait_until_gone(pidfd: int) -> None:
    try:
        assert select.select([pidfd], [], [], PATIENCE_S)[0], "the process lives on"
    finally:
        os.close(pidfd)


@pytest.mark.parametrize("model", ["llama", "qwen3", "phi3", "gemma3", "qwen2-moe", "deepseek-v3", "opt"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_the_tokens_are_those_of_one_process(
    tensor: int, pipeline: int, model: str, start_engine: StartEngine, shared_engine: StartEngine
) -> None:
    expected = generate(start_engine(model=model), *requests())
    if model == "llama":
        engine = shared_engine(tensor, pipeline)
    else:
        engine = start_engine(tensor, pipeline, model, max_batch_tokens=30, chunk_tokens=9)
    assert generate(engine, *requests()) == expected
    assert engine.stats().num_free_blocks == engine.num_blocks


@pytest.mark.parametrize("model", ["llama", "gemma3", "deepseek-v3", "opt"])
def test_stages_round_no_more_than_one_process(model: str, start_engine: StartEngine) -> None:
    expected = generate(start_engine(model=model, dtype="bfloat16"), *requests())
    engine = start_engine(1, 2, model, max_batch_tokens=30, chunk_tokens=9, dtype="bfloat16")
    assert generate(engine, *requests()) == expected


@pytest.mark.parametrize(("tensor", "pipeline", "model"), [(2, 1, "llama"), (2, 1, "opt"), (1, 2, "qwen2-moe")])
def test_ranks_keep_weights_on_the_host(tensor: int, pipeline: int, model: str, start_engine: StartEngine) -> None:
    expected = generate(start_engine(model=model), *requests())
    engine = start_engine(tensor, pipeline, model, host_weights=1.0)
    assert generate(engine, *requests()) == expected


@pytest.mark.parametrize("schedule", ["latency", "throughput"])
@pytest.mark.parametrize(("model", "tensor"), [("llama", 2), ("opt", 2), ("deepseek-v3", 2), ("llama", 4)])
def test_ranks_keep_kv_on_the_host(
    model: str, tensor: int, schedule: OffloadSchedule, start_engine: StartEngine
) -> None:
    """Each rank its own part; the passes of a step are the same on all of them."""
    plain = start_engine(model=model, prefix_cache=False)
    expected = generate(plain, *requests())
    options: dict[str, Any] = {"num_blocks": 32, "max_context_tokens": 128, "max_batch_tokens": 30, "chunk_tokens": 9}
    options["prefix_cache"] = False
    offload = OffloadConfig(1 << 20, schedule)
    engine = start_engine(tensor, 1, model, offload=offload, **options)
    num_staged: Counter[str] = Counter()
    found: dict[str, list[int]] = {}
    for one in requests():
        engine.add(one)
    while engine.has_work():
        result = engine.step()
        num_staged.update(result.staged.num_groups)
        for output in result.outputs:
            found.setdefault(output.request_id, []).append(output.token_id)
        engine.check_integrity()
    assert found == expected
    assert set(num_staged) == {"load"}
    assert num_staged["load"] > 5
    assert engine.stats().num_free_blocks == engine.num_blocks
    last = request("last", 40)
    assert hand_over(plain, engine, last) == generate(plain, last)["last"]
    assert hand_over(engine, plain, replace(last, request_id="back")) == generate(plain, last)["last"]


def hand_over(source: Engine, target: Engine, one: EngineRequest, token_step: int = 16) -> list[int]:
    """Prefill there, decode here; the KV in pieces of one and of two layers."""
    prefill = EngineRequest(one.request_id, one.prompt_token_ids, one.sampling, prefill_only=True)
    (first,) = generate(source, prefill)[one.request_id]
    target.reserve(one)
    length = len(one.prompt_token_ids)
    for layers in ((0, 2), (2, 3)):
        for start in range(0, length, token_step):
            part = KVSlice(*layers, start, min(token_step, length - start))
            target.kv_write(one.request_id, part, source.kv_read(one.request_id, part))
    whole = KVSlice(0, source.layout.num_layers, 0, length)
    source_kv = torch.frombuffer(bytearray(source.kv_read(one.request_id, whole)), dtype=torch.float32)
    source.cancel(one.request_id)
    target.start(one.request_id, first)
    tokens = [first, *finish(target)[one.request_id]]
    assert source_kv.isfinite().all()
    return tokens


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (2, 2), (4, 1)], ids=str)
def test_kv_moves_between_differently_cut_workers(
    tensor: int, pipeline: int, start_engine: StartEngine, shared_engine: StartEngine
) -> None:
    """With 4 tensor ranks the 2 KV heads are held twice."""
    one = shared_engine()
    many = start_engine(tensor, pipeline, prefix_cache=False) if tensor == 4 else shared_engine(tensor, pipeline)
    for wanted in requests():
        expected = generate(one, wanted)[wanted.request_id]
        assert hand_over(many, one, wanted) == expected
        assert hand_over(one, many, wanted) == expected
    for engine in (one, many):
        assert engine.stats().num_free_blocks == engine.num_blocks


@pytest.mark.parametrize(("kv_dtype", "step"), [("int8", 1 / 100), ("fp8", 1 / 8)])
def test_ranks_round_kv_as_one_process_does(start_engine: StartEngine, kv_dtype: KVDtype, step: float) -> None:
    one, many = (start_engine(tensor, kv_dtype=kv_dtype, prefix_cache=False) for tensor in (1, 2))
    wanted, layout = request("a", 20, prefill_only=True), one.layout
    numbers = []
    for engine in (one, many):
        generate(engine, wanted)
        rows = engine.kv_read("a", KVSlice(0, layout.num_layers, 0, 20))
        assert rows.nbytes == 20 * layout.token_bytes
        bits = decode(Codec.RAW, rows, layout.shape(layout.num_layers, 20), kv_dtype, "float32")
        numbers.append(torch.from_numpy(bits.view("f4")))
    torch.testing.assert_close(*numbers, atol=float(numbers[0].abs().max()) * step, rtol=0)
    many.reserve(request("b", 20))
    part = KVSlice(0, layout.num_layers, 0, 20)
    many.kv_write("b", part, one.kv_read("a", part))
    many.start("b", 5)
    assert len(finish(many)["b"]) == 9


def test_kv_bytes_are_canonical_and_checked(shared_engine: StartEngine) -> None:
    one, many = shared_engine(), shared_engine(2)
    wanted = request("a", 20, prefill_only=True)
    for engine in (one, many):
        generate(engine, wanted)
    part = KVSlice(1, 3, 3, 14)
    expected, got = (
        torch.frombuffer(bytearray(engine.kv_read("a", part)), dtype=torch.float32) for engine in (one, many)
    )
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert expected.std() > 0.1
    for engine in (one, many):
        with pytest.raises(InvalidRequest):
            engine.kv_read("a", KVSlice(0, 4, 0, 1))
        engine.reserve(request("b", 20))
        with pytest.raises(InvalidRequest):
            engine.kv_write("b", KVSlice(0, 1, 0, 1), bytes(7))
        with pytest.raises(InvalidRequest):
            engine.kv_write("b", KVSlice(0, 1, 30, 1), bytes(256))
        engine.cancel_all()


@pytest.mark.usefixtures("own_processes")
def test_successive_chunks_occupy_successive_stages(start_engine: StartEngine, shared_engine: StartEngine) -> None:
    """Each stage is held before a chunk while the one before it goes on to the next: order, not time, is the proof."""
    expected = generate(shared_engine(), request("a", 40))
    engine = start_engine(1, 3, max_batch_tokens=10, chunk_tokens=10)
    events: list[tuple[int, int]] = []  # (stage, chunk), as each is known to be computed

    def chunk_is_done(stage: int, chunk: int) -> None:
        """Blocks until the follower has computed that many steps."""
        in_time(lambda: followers(engine).ask({stage: (ReadKV(chunk + 1, [0], KVSlice(0, 1, 0, 1)), b"")}))
        events.append((stage, chunk))

    def step() -> None:
        result = in_time(engine.step)
        assert (result.num_prefill_tokens, result.outputs) == (10, ())
        events.append((0, sum(stage == 0 for stage, _ in events)))

    engine.add(request("a", 40))
    with stopped(pid(engine, 2)):
        with stopped(pid(engine, 1)):
            step()
            step()  # chunk 1 on stage 0, chunk 0 before stage 1
        chunk_is_done(1, 0)
        step()  # chunk 2 on stage 0
        chunk_is_done(1, 1)  # chunk 1 on stage 1, chunk 0 before stage 2
    chunk_is_done(2, 0)
    tokens = finish(engine)
    chunk_is_done(1, 3)
    chunk_is_done(2, 3)
    assert tokens == expected
    for stage, chunk in ((1, 0), (1, 1), (2, 0)):
        assert events.index((stage - 1, chunk + 1)) < events.index((stage, chunk))
    assert events[:6] == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0)]


@pytest.mark.usefixtures("own_processes")
def test_blocks_of_a_cancelled_prompt_are_written_after_its_last_chunk(
    start_engine: StartEngine, shared_engine: StartEngine
) -> None:
    one = shared_engine()
    engine = start_engine(1, 2, prefix_cache=False, num_blocks=6, max_batch_tokens=16)
    wanted = request("moved", 30)
    expected = generate(one, wanted)["moved"]
    (first,) = generate(one, request("moved", 30, prefill_only=True))["moved"]
    payload = one.kv_read("moved", KVSlice(0, 3, 0, 30))
    one.cancel("moved")
    engine.add(request("cancelled", 33))
    with stopped(pid(engine, 1)):
        assert in_time(engine.step).num_prefill_tokens == 16
        assert engine.cancel("cancelled")
        engine.reserve(wanted)
        writer = threading.Thread(target=engine.kv_write, args=("moved", KVSlice(0, 3, 0, 30), payload))
        writer.start()
    writer.join()
    engine.start("moved", first)
    assert [first, *finish(engine)["moved"]] == expected


def test_a_failure_outside_the_exchange_ends_its_requests_only(
    shared_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = shared_engine(1, 2)
    expected = generate(shared_engine(), request("later", 20))
    runner: Any = engine._runner

    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    for name in ("batch", "sample"):
        engine.add(request("a", 20))
        with monkeypatch.context() as patch:
            patch.setattr(runner._rank.runner, name, broken)
            (output,) = engine.step().outputs
        assert (output.token_id, output.finish_reason) == (ERROR_TOKEN_ID, "error")
    assert engine.stats().num_free_blocks == engine.num_blocks
    assert generate(engine, request("later", 20)) == expected


@pytest.mark.usefixtures("own_processes")
def test_a_failure_between_ranks_ends_all(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start_engine(2)
    gone = os.pidfd_open(pid(engine, 1))
    runner: Any = engine._runner

    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    engine.add(request("a", 20))
    monkeypatch.setattr(runner._rank.runner, "forward", broken)
    for _ in range(2):
        with pytest.raises(ServiceFailed, match="rank 0 failed in a step: RuntimeError: out of luck"):
            engine.step()
    wait_until_gone(gone)


@pytest.mark.usefixtures("own_processes")
def test_a_killed_follower_ends_the_engine_in_mid_step(start_engine: StartEngine) -> None:
    engine = start_engine(2, 2)
    gone = [os.pidfd_open(pid(engine, rank)) for rank in (1, 2, 3)]
    generate(engine, request("held", 20, prefill_only=True))
    engine.add(request("a", 20))
    errors: list[ServiceFailed] = []

    def step() -> None:
        try:
            engine.step()
        except ServiceFailed as error:
            errors.append(error)

    stepping = threading.Thread(target=step)
    with stopped(pid(engine, 3)):  # so the step cannot end before the kill
        stepping.start()
        os.kill(pid(engine, 3), signal.SIGKILL)
    stepping.join(PATIENCE_S)
    assert [error.message for error in errors] == ["follower rank 3 was killed by signal 9"]
    for one in gone:
        wait_until_gone(one)
    with pytest.raises(ServiceFailed, match="killed by signal 9"):
        engine.kv_read("held", KVSlice(0, 3, 0, 20))
    with pytest.raises(ServiceFailed, match="killed by signal 9"):
        engine.check_ranks()
    engine.cancel_all()
    assert engine.stats().num_free_blocks == engine.num_blocks


@pytest.mark.usefixtures("own_processes")
async def test_a_follower_that_dies_while_nothing_runs_is_noticed(start_engine: StartEngine) -> None:
    engine = start_engine(2)
    death: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    async with AsyncEngine(engine, lambda result: None, death.set_result) as async_engine:
        await async_engine.stats()
        os.kill(pid(engine, 1), signal.SIGKILL)
        error = await asyncio.wait_for(death, PATIENCE_S)
        assert isinstance(error, ServiceFailed)
        assert error.message == "follower rank 1 was killed by signal 9"


@pytest.mark.usefixtures("own_processes")
async def test_the_followers_end_with_the_engine(start_engine: StartEngine) -> None:
    engine = start_engine(1, 2)
    gone = os.pidfd_open(pid(engine, 1))
    stepped = asyncio.Event()
    async with AsyncEngine(engine, lambda result: stepped.set()) as async_engine:
        await async_engine.add(request("a", 40, max_tokens=100))
        await asyncio.wait_for(stepped.wait(), PATIENCE_S)
    wait_until_gone(gone)
    assert engine.stats().num_free_blocks == engine.num_blocks
    engine.close()


PARENT = """
import sys
from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
engine = Engine(prepare_checkpoint(sys.argv[1]), EngineConfig(num_blocks=4, tensor_parallel=2))
for follower in engine._runner._followers.by_rank.values():
    sys.stdout.write(f"{follower.process.pid}\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def test_no_orphan_is_left_when_rank_0_is_killed(tiny_checkpoint: Callable[[str], Checkpoint]) -> None:
    command = [sys.executable, "-c", PARENT, str(tiny_checkpoint("llama").path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        gone = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    wait_until_gone(gone)


@pytest.mark.usefixtures("own_processes")
def test_what_a_follower_cannot_load_is_refused_and_nothing_is_left(
    tiny_checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    shutil.copy(tiny_checkpoint("llama").path / "config.json", tmp_path)
    tensors = load_file(tiny_checkpoint("llama").weight_files[0])
    del tensors["model.layers.2.mlp.down_proj.weight"]  # the second stage's
    save_file(tensors, tmp_path / "model.safetensors")
    before = set(psutil.Process().children())
    config = EngineConfig(dtype="float32", num_blocks=4, pipeline_parallel=2)
    with pytest.raises(Incompatible, match=r"follower rank 1: the checkpoint lacks 1 tensors: model\.layers\.2"):
        Engine(prepare_checkpoint(str(tmp_path)), config)
    assert set(psutil.Process().children()) <= before


def test_dummy_weights_are_the_same_however_they_are_cut(start_engine: StartEngine) -> None:
    expected = generate(start_engine(weights="dummy"), *requests())
    assert generate(start_engine(1, 2, weights="dummy"), *requests()) == expected


def stream(source: Engine, target: Engine, one: EngineRequest) -> list[int]:
    """Prefill there, decode here; each layer is copied the moment the source tells of it, in the middle of steps."""
    sent = [0] * source.layout.num_layers

    def copy(written: Written | None) -> None:
        for layer, start in enumerate(sent if written is not None else []):
            assert written is not None
            if (end := written.num_tokens_of(layer)) > start:
                part = KVSlice(layer, layer + 1, start, end - start)
                target.kv_write(one.request_id, part, source.kv_read(one.request_id, part))
                sent[layer] = end

    target.reserve(one)
    source.add(EngineRequest(one.request_id, one.prompt_token_ids, one.sampling, prefill_only=True), copy)
    (first,) = finish(source)[one.request_id]
    assert sent == [len(one.prompt_token_ids)] * source.layout.num_layers
    source.cancel(one.request_id)
    target.start(one.request_id, first)
    return [first, *finish(target)[one.request_id]]


CUTS = [(1, 1), (1, 2), (2, 1), (2, 2)]


@pytest.mark.parametrize("source", CUTS, ids=str)
@pytest.mark.parametrize("target", CUTS, ids=str)
def test_kv_streams_layer_by_layer_from_any_cut_to_any_other(
    source: tuple[int, int], target: tuple[int, int], shared_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = shared_engine(*source), shared_engine(*target, twin=True)
    monkeypatch.setattr(there._kv_watch, "_frame_layers", lambda num_tokens: 1)
    wanted = request("moved", 70)
    assert stream(there, here, wanted) == generate(shared_engine(), wanted)["moved"]
    for engine in (there, here):
        assert engine.stats().num_free_blocks == engine.num_blocks


@pytest.mark.parametrize(
    ("cut", "layers"),
    [((1, 1), [1, 2, 3]), ((2, 1), [1, 2]), ((1, 2), [1, 2]), ((2, 2), [1])],
    ids=["one rank", "tensor", "pipeline", "both"],
)
def test_a_layer_is_told_when_every_rank_has_written_it(
    cut: tuple[int, int], layers: list[int], shared_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor ranks are known to have it at the next layer's sum; later stages when the step is over."""
    engine = shared_engine(*cut)
    monkeypatch.setattr(engine._kv_watch, "_frame_layers", lambda num_tokens: 1)
    heard: list[Written | None] = []
    engine.add(request("a", 20, prefill_only=True), heard.append)
    finish(engine)
    engine.cancel_all()
    assert heard == [*(Written(0, 20, count) for count in layers), Written(20), None]


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_log_probabilities_of_prompts_are_those_of_one_device(
    shared_engine: Callable[..., Engine], tensor: int, pipeline: int
) -> None:
    def found(engine: Engine) -> list[TokenLogprobs]:
        wanted = request("r", 40, 1)
        engine.add(replace(wanted, sampling=replace(wanted.sampling, num_prompt_logprobs=2)))
        outputs: list[TokenOutput] = []
        while engine.has_work():
            outputs += engine.step().outputs
        return list(outputs[0].prompt_logprobs)

    expected, ours = found(shared_engine()), found(shared_engine(tensor, pipeline))
    assert len(ours) == len(expected) == 39
    for one, other in zip(ours, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.rank == other.rank


def test_embeddings_are_refused_before_anything_is_computed(shared_engine: Callable[..., Engine]) -> None:
    wanted = request("r", 8, 1)
    with pytest.raises(InvalidRequest, match="several ranks") as refusal:
        shared_engine(2, 1).add(replace(wanted, sampling=replace(wanted.sampling, pooling="mean")))
    assert refusal.value.param == "pooling"
    assert not shared_engine(2, 1).has_work()
