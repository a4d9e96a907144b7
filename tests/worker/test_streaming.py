"""KV that is sent while it is computed: it does arrive before, and the tokens are those of one process all the same."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from halfmoon.engine.attention.watched_attention import WatchedAttention
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.kv_memory.kv_watch import KVWatch
from halfmoon.engine.step_result import StepResult
from halfmoon.kv import frame_plan
from halfmoon.kv.kv_layout import KVSlice
from halfmoon.pb import prefill_pb2
from halfmoon.policy.models.latency import PrefillSample
from tests.worker.conftest import RunningWorker
from tests.worker.test_handover import generation, listening, prefilled, reference, tokens_of, until
from tests.worker.test_many_handovers import collect

Start = Callable[..., Awaitable[RunningWorker]]
PATIENCE_S = 30.0
NUM_LAYERS = 2


@pytest.fixture(autouse=True)
def _every_layer_is_worth_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a large model: the tiny one's whole prompts are smaller than a frame."""
    monkeypatch.setattr(frame_plan, "MIN_FRAME_BYTES", 1)
    monkeypatch.setattr(frame_plan, "MIN_FRAME_TOKENS", 1)
    monkeypatch.setattr(KVWatch, "_frame_layers", lambda watch, num_tokens: 1)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(7 * i + 11 * seed + 3) % 125 + 3 for i in range(length)]


async def handed_over(
    prefill: RunningWorker, decode: RunningWorker, checkpoint: Checkpoint, prompt: list[int], name: str = "r"
) -> tuple[Any, list[int]]:
    """The first event and all tokens."""
    async with listening(decode) as steps:
        request = prefill_pb2.PrefillRequest(
            generation=generation(checkpoint, prompt, 12, name), decode_address=decode.peer.address
        )
        first, done = await prefilled(prefill, request)
        assert done.handed_over.kv_bytes == len(prompt) * decode.engine.layout.token_bytes
        return first, [first.first_token.token.token_id, *await tokens_of(steps, name)]


def record_writes(worker: RunningWorker, monkeypatch: pytest.MonkeyPatch) -> list[KVSlice]:
    """The part in each frame, once it is in place."""
    written: list[KVSlice] = []
    write = worker.engine.kv_write

    def recorded(request_id: str, part: KVSlice, *payload: Any) -> None:
        write(request_id, part, *payload)
        written.append(part)

    monkeypatch.setattr(worker.engine, "kv_write", recorded)
    return written


def wait_for(condition: Callable[[], bool]) -> bool:
    """On a thread: whether it comes true. What is watched is done by other threads and has no event."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.005)):
        if condition():
            return True
        pause.wait(0.005)
    return False


@pytest.mark.parametrize("num_prompt", [1, 8, 100])
async def test_a_layer_has_arrived_before_the_next_one_is_computed(
    start_worker: Start, tiny: Checkpoint, num_prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer but the first of a chunk waits here until the one before it is on the other worker."""
    prefill = await start_worker("prefill", max_batch_tokens=40, max_running=8)
    decode = await start_worker("decode")
    written = record_writes(decode, monkeypatch)
    arrived: list[bool] = []
    stored = WatchedAttention.stored

    def stored_and_arrived(watched: WatchedAttention, num_layers: int) -> None:
        stored(watched, num_layers)
        if num_layers < NUM_LAYERS:
            num_due = len(arrived) * NUM_LAYERS + num_layers
            arrived.append(wait_for(lambda: len(written) >= num_due))

    monkeypatch.setattr(WatchedAttention, "stored", stored_and_arrived)
    _, tokens = await handed_over(prefill, decode, tiny, prompt_of(num_prompt))
    num_chunks = -(-num_prompt // 40)
    assert arrived == [True] * num_chunks
    layers = sorted((where[0], where[1]) for where in written)  # a chunk's last may come beside the next one's first
    assert layers == [(0, 1)] * num_chunks + [(1, 2)] * num_chunks
    assert tokens == reference(tiny, prompt_of(num_prompt), 12)


async def test_a_known_prefix_leaves_before_the_rest_is_computed(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await start_worker("prefill"), await start_worker("decode", num_blocks=64, prefix_cache=False)
    prompt = prompt_of(100)
    _, once = await handed_over(prefill, decode, tiny, prompt)
    written = record_writes(decode, monkeypatch)
    run = prefill.engine._runner.run
    in_time: list[bool] = []

    def run_after_arrival(*args: Any) -> Any:
        in_time.append(wait_for(lambda: (0, 2, 0, 96) in written))
        return run(*args)

    monkeypatch.setattr(prefill.engine._runner, "run", run_after_arrival)
    other = [*prompt[:96], *reversed(prompt[96:])]
    first, then = await handed_over(prefill, decode, tiny, other, "again")
    assert in_time == [True]
    assert first.first_token.num_cached_tokens == 96
    assert (once, then) == (reference(tiny, prompt, 12), reference(tiny, other, 12))


async def test_a_prompt_that_is_preempted_on_its_way_arrives_right(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoding request of a higher rank takes the prompt's blocks after some of its KV has left."""
    options: dict[str, Any] = {"num_blocks": 13, "prefix_cache": False, "max_batch_tokens": 9, "max_running": 8}
    both, decode = await start_worker("both", **options), await start_worker("decode")
    written = record_writes(decode, monkeypatch)
    preempted_after: list[int] = []
    step, present = both.engine.step, both.engine._sequences
    moved: list[Any] = []  # the sequence, once it is there

    def step_when_due() -> StepResult:
        """The one waits for the other to come, and to have sent something, before it takes its blocks."""
        moved.extend(sequence for name, sequence in present.items() if name == "moved" and sequence not in moved)
        if not moved and "grows" in present and present["grows"].num_output:
            return StepResult()
        if moved and moved[0].written.num_tokens:
            wait_for(lambda: bool(written))
        result = step()
        preempted_after.extend([len(written)] * result.num_preempted)
        return result

    monkeypatch.setattr(both.engine, "step", step_when_due)
    grows = generation(tiny, prompt_of(14, seed=5), 40, "grows")
    grows.priority = -1
    async with listening(both) as steps:
        first_of_grows, _ = await prefilled(both, prefill_pb2.PrefillRequest(generation=grows))
        _, tokens = await handed_over(both, decode, tiny, prompt_of(85), "moved")
        tokens_of_grows = [first_of_grows.first_token.token.token_id, *await tokens_of(steps, "grows")]
    assert preempted_after
    assert preempted_after[0] > 0
    assert tokens == reference(tiny, prompt_of(85), 12)
    assert tokens_of_grows == reference(tiny, prompt_of(14, seed=5), 40)
    await until(lambda: both.num_used_blocks + decode.num_used_blocks == 0)


async def test_many_at_once_with_shared_prefixes_in_small_chunks_and_few_blocks(
    start_worker: Start, tiny: Checkpoint
) -> None:
    """Half of them go on where they were prefilled, and take blocks from prompts that are on their way."""
    both = await start_worker("both", num_blocks=30, max_batch_tokens=12, chunk_tokens=8, max_running=8)
    decode = await start_worker("decode", num_blocks=64)
    prompts = {f"r{n}": [*prompt_of(24, seed=n % 2), *prompt_of(5 + 6 * n, seed=n)] for n in range(10)}
    found: dict[str, list[int]] = {}

    async def one(number: int, name: str) -> None:
        there = decode.peer.address if number % 2 else ""
        asked = generation(tiny, prompts[name], 20, name)
        asked.priority = number % 2  # those that stay go first
        first, _ = await prefilled(both, prefill_pb2.PrefillRequest(generation=asked, decode_address=there))
        found[name] = [first.first_token.token.token_id]

    async with listening(both) as here, listening(decode) as away:
        rest: dict[str, list[int]] = defaultdict(list)
        await asyncio.gather(
            collect(here, 5, rest), collect(away, 5, rest), *(one(n, name) for n, name in enumerate(prompts))
        )
    expected = {name: reference(tiny, prompt, 20) for name, prompt in prompts.items()}
    assert {name: found[name] + rest[name] for name in prompts} == expected
    await until(lambda: both.num_used_blocks + decode.num_used_blocks == 0)


async def test_what_computing_did_not_hide_is_measured(start_worker: Start, tiny: Checkpoint) -> None:
    prefill, decode = await start_worker("prefill"), await start_worker("decode")
    prefill.state.compute_rate.begin_with([PrefillSample(50, 0, 1.0)] * 3)  # so it begins once the transfer is open
    await handed_over(prefill, decode, tiny, prompt_of(50))
    read = prefill.metrics.registry.get_sample_value
    assert read("halfmoon_handover_exposed_seconds_count") == 1
    exposed_s, whole_s = (read(f"halfmoon_handover_{name}_sum") for name in ("exposed_seconds", "seconds"))
    assert exposed_s is not None
    assert whole_s is not None
    assert 0 < exposed_s < whole_s
