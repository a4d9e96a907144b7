"""Speed of the device and its link, measured at start: v_gpu and v_link of KVPR, in seconds per token and layer.

Every cost per token is the slope between a small and a large measurement; the intercept is the cost to begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from halfmoon.engine.attention.attention import store
from halfmoon.engine.chunk import Chunk
from halfmoon.engine.model_runner import ModelRunner
from halfmoon.engine.offload.link import Copy, Link
from halfmoon.engine.offload.staging import Staging
from halfmoon.engine.offload.tiers import TieredKV, as_rows
from halfmoon.policy.offload.recompute import OffloadCosts, Recompute

_MOST_TOKENS = 256
_MOST_LINK_BYTES = 64 << 20
_LEAST_ROUNDS = 3
_ROUNDS_S = 0.1  # small measurements repeat for this long: a briefly busy machine does not count as slow


@torch.inference_mode()
def measure_costs(runner: ModelRunner, memory: TieredKV, staging: Staging, link: Link) -> OffloadCosts:
    """Takes the fastest of several rounds each. Overwrites the first blocks of both memories: run it on empty ones."""
    num_layers, size = memory.host.shape[0], memory.block_tokens
    room = (memory.device.num_blocks, memory.pool.num_blocks - memory.device.num_blocks, staging.num_blocks)
    num_blocks = min(*room, -(-_MOST_TOKENS // size))
    num_tokens = num_blocks * size
    memory.device.tensor[:, :, :, :num_tokens].zero_()
    memory.host[:, :, : 2 * num_tokens].zero_()
    staged = staging.kv[0]

    def load(num: int) -> None:
        planes = (memory.host[0, :, :num], memory.host[0, :, num_tokens : num_tokens + num])
        link.fetch([Copy(plane, staged[n, :, :num]) for n, plane in enumerate(planes)]).wait()

    def compute(num: int, start: int = 0) -> None:
        batch = runner.batch([Chunk([0] * num, start, range(num_blocks), num_logits=0)])
        runner.forward(batch)

    def compute_inputs(num: int) -> None:
        assert memory.keys_values is not None
        k, v = memory.keys_values(0, as_rows(staging.inputs[0][:, :num]))
        store(k, v, staged, slots[:num])

    begin_fetch_s, load_s = _line(load, num_tokens)
    base_s = _fastest(lambda: compute(1, num_tokens - 1)) / num_layers
    begin_tokens_s, tokens_s = (seconds / num_layers for seconds in _line(compute, num_tokens))
    inputs = None
    if memory.keys_values is not None:
        slots = torch.arange(num_tokens, device=staged.device)
        staging.inputs[0].zero_()
        begin_s, input_s = _line(compute_inputs, num_tokens)
        inputs = Recompute(load_s / 2, input_s, begin_s)
    link.take_work()
    tokens = Recompute(0.0, tokens_s, max(0.0, begin_tokens_s - base_s))
    return OffloadCosts(load_s, base_s, inputs, tokens, begin_fetch_s)


def measure_load(num_bytes: int, device: torch.device, link: Link) -> float:
    """Seconds to fetch `num_bytes` in one piece, such as a layer's weights."""
    size = min(num_bytes, _MOST_LINK_BYTES)
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    copies = [Copy(source, torch.empty(size, dtype=torch.uint8, device=device))]
    seconds = _fastest(lambda: link.fetch(copies).wait()) * num_bytes / size
    link.take_work()
    return seconds


@torch.inference_mode()
def measure_context(runner: ModelRunner, block_tokens: int, num_blocks: int, num_layers: int) -> float:
    """Seconds per layer that a decode takes longer for each token it attends to. KV memory: `num_blocks` first ones."""
    most = num_blocks * block_tokens

    def decode(start: int) -> None:
        runner.forward(runner.batch([Chunk([0], start - 1, range(num_blocks), num_logits=0)]))

    return _line(decode, most)[1] / num_layers


def _line(work: Callable[[int], None], most: int) -> tuple[float, float]:
    """(seconds to begin, seconds for each unit) of `work(num)`, from 1 and from `most` units."""
    few_s, all_s = (_fastest(lambda num=num: work(num)) for num in (1, most))  # type: ignore[misc]
    each_s = max(0.0, all_s - few_s) / max(1, most - 1)
    return max(0.0, few_s - each_s), each_s


def _fastest(work: Callable[[], object]) -> float:
    times_s: list[float] = []
    while len(times_s) < _LEAST_ROUNDS or sum(times_s) < _ROUNDS_S:
        times_s.append(_timed(work))
    return min(times_s)


def _timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started_s
