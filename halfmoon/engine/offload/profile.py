"""What the device and its link can do, measured at start: v_gpu and v_link of KVPR, in seconds a token and layer."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from halfmoon.engine.chunk import Chunk
from halfmoon.engine.model_runner import ModelRunner
from halfmoon.engine.offload.attention import KeysValues
from halfmoon.engine.offload.link import Copy, Link
from halfmoon.engine.offload.staging import Staging
from halfmoon.engine.offload.tiers import TieredKV
from halfmoon.policy.offload import OffloadCosts, Recompute

_MOST_TOKENS = 256
_ROUNDS = 3


@torch.inference_mode()
def measure_costs(
    runner: ModelRunner,
    memory: TieredKV,
    staging: Staging,
    link: Link,
    keys_values: KeysValues | None,
    block_tokens: int,
) -> OffloadCosts:
    """The fastest of a few rounds each. Uses the first blocks of both memories: run it before anything is in them."""
    num_layers = memory.host.tensor.shape[0]
    num_blocks = min(
        memory.device.num_blocks, memory.host.num_blocks, staging.num_blocks, -(-_MOST_TOKENS // block_tokens)
    )
    num_tokens = num_blocks * block_tokens
    source, target = memory.host.tensor[0, :, :, :num_tokens], staging.kv[0][:, :, :num_tokens]

    def load() -> None:
        link.fetch([Copy(source, target)]).wait()

    def compute(num: int) -> None:
        batch = runner.batch([Chunk([0] * num, 0, range(num_blocks), samples=False)])
        runner.forward(batch)

    load_s = _fastest(load) / num_tokens
    base_s = _fastest(lambda: compute(1)) / num_layers
    tokens_s = max(0.0, _fastest(lambda: compute(num_tokens)) / num_layers - base_s) / num_tokens
    inputs = None
    if keys_values is not None and memory.inputs is not None:
        x = staging.inputs[0][:num_tokens].zero_()
        share = memory.inputs[0, 0].nbytes * num_tokens / source.nbytes
        inputs = Recompute(load_s * share, _fastest(lambda: keys_values(0, x)) / num_tokens)
    return OffloadCosts(load_s, base_s, inputs, Recompute(0.0, tokens_s))


def _fastest(work: Callable[[], object]) -> float:
    times_s = []
    for _ in range(_ROUNDS):
        started_s = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)
