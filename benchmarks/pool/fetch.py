"""TTFT of a prompt whose prefix only another worker has: fetched, computed, or both, over links of several speeds.

"both" loads whole blocks, "by layer" may also have blocks arrive while the step behind them computes.

The demo model runs in this process and in the worker that has the prefix. Their link is limited to each rate in turn,
and to the rate at which fetching takes as long as computing did in this run. The three methods take turns, so that
other load on the machine affects all alike. Printed are medians; ratios are medians of each turn's ratio.
"""

from __future__ import annotations

import argparse
import statistics
from typing import get_args

from benchmarks.prefixes.restoring_worker import Method, Restored, Worker, killed_at_the_end, made_up, running_worker
from halfmoon.pb import prefill_pb2, prefill_pb2_grpc, types_pb2
from halfmoon.rpc.peer import Peer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this measurement, and what runs it."""
    parser.add_argument("--tokens", type=int, default=1500, help="of the prefix")
    parser.add_argument("--rates", type=float, nargs="*", default=[50, 200, 1000], help="MB/s")
    parser.add_argument("--new", type=int, nargs="*", default=[37], help="tokens behind the prefix")
    parser.add_argument("--repeat", type=int, default=7)
    parser.set_defaults(run=lambda given: show(given.tokens, given.new, given.rates, given.repeat))


async def show(num_tokens: int, nums_new: list[int], rates_mbps: list[float], repeat: int) -> None:
    """Prints the tables."""
    prefix = made_up(num_tokens, 1)
    options = ("--model", "demo", "--listen", "127.0.0.1:0", "--gateway", "127.0.0.1:1", "--calibrate", "never")
    async with (
        killed_at_the_end("services.prefill", *options) as holder,
        running_worker(num_tokens + max(nums_new)) as worker,
    ):
        await _warm(holder, prefix, worker.engine.engine.checkpoint.fingerprint)
        layout = worker.engine.engine.layout
        megabytes = num_tokens // layout.block_tokens * layout.block_bytes / 1e6
        for num_new in nums_new:
            prompt = [*prefix, *made_up(num_new, 2)]
            computed = [await worker.restore(prompt, holder, None, "compute", "worker") for _ in range(3)]
            balance_mbps = megabytes / statistics.median(one.ttft_s for one in computed)
            print(
                f"{num_tokens} tokens, {megabytes:.0f} MB, {layout.dtype}, and {num_new} new ones, median of {repeat}; "
                "ratios: both / better single, by layer / both"
            )
            print(
                f"{'MB/s':>6}{'compute s':>11}{'fetch s':>9}{'both s':>9}{'ratio':>7}{'fetched':>9}"
                f"{'by layer s':>12}{'ratio':>7}"
            )
            for mbps in sorted([*rates_mbps, round(balance_mbps, 1)]):
                await _row(worker, prompt, holder, mbps, repeat, computed[0])


async def _row(worker: Worker, prompt: list[int], holder: str, mbps: float, repeat: int, computed: Restored) -> None:
    turns = []
    for by_layer in (False, True):  # connects, and learns the link
        await worker.restore(prompt, holder, mbps, "load", "worker", may_load_by_layer=by_layer)
    for _ in range(repeat):
        turn = {
            method: await worker.restore(prompt, holder, mbps, method, "worker", may_load_by_layer=False)
            for method in get_args(Method)
        }
        turn["by layer"] = await worker.restore(prompt, holder, mbps, "restore", "worker")
        turns.append(turn)
        if {result.token_id for result in turn.values()} != {computed.token_id}:
            print(f"  different tokens: {turn}")
    compute_s, load_s, both_s, layers_s = (
        statistics.median(turn[method].ttft_s for turn in turns) for method in (*get_args(Method), "by layer")
    )
    ratio = statistics.median(
        turn["restore"].ttft_s / min(turn["compute"].ttft_s, turn["load"].ttft_s) for turn in turns
    )
    loaded = statistics.median(turn["restore"].num_loaded_tokens for turn in turns)
    gain = statistics.median(turn["by layer"].ttft_s / turn["restore"].ttft_s for turn in turns)
    print(
        f"{mbps:6.0f}{compute_s:11.3f}{load_s:9.3f}{both_s:9.3f}{ratio:7.2f}{loaded / len(prompt):9.0%}"
        f"{layers_s:12.3f}{gain:7.2f}",
        flush=True,
    )


async def _warm(holder: str, prefix: list[int], fingerprint: str) -> None:
    """Has the other worker compute the prefix, which stays in its cache."""
    sampling = types_pb2.SamplingParams(max_tokens=1, top_p=1, repetition_penalty=1, ignore_eos=True)
    generation = types_pb2.Generation(
        request_id="warm", model_fingerprint=fingerprint, prompt_token_ids=[*prefix, 1000], sampling=sampling
    )
    request = prefill_pb2.PrefillRequest(generation=generation, decode_address="127.0.0.1:1")
    async with (
        Peer(holder) as peer,
        peer.stream(prefill_pb2_grpc.PrefillStub(peer.channel).Prefill, request, deadline_s=120) as events,
    ):
        async for _ in events:
            pass
