"""Plain `vllm serve`, Halfmoon over one vLLM, and over one for each phase: `benchmarks.serving` on the three in turns.

    python -m benchmarks.serving_vllm .venv-vllm/bin/python --repeat 3

All have the same model, limits and cores. They start one after the other, which takes minutes, and are all there while
the turns run: about 3 GB each, and 3 more for the second phase. Below the table is how long hand-overs were exposed:
from the end of a prefill until its KV was at the decode worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp

from benchmarks.live_system import free_port, running_system
from benchmarks.serving import SCENARIOS, Server, measure, table
from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint

_START_S = 900.0
_POLL_S = 0.5
_BLOCK_TOKENS, _MAX_RUNNING = 64, 64
_SYSTEMS = {"both": ("--both", "1"), "1p1d": ("--prefill", "1", "--decode", "1")}


@asynccontextmanager
async def plain_vllm(python: Path, arguments: argparse.Namespace) -> AsyncIterator[str]:
    """Yields the URL of a `vllm serve` with our workers' options. Raises TimeoutError if it is not ready in time."""
    port = free_port()
    options = (
        *("--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port), "--dtype", arguments.dtype),
        *("--block-size", str(_BLOCK_TOKENS), "--max-num-seqs", str(_MAX_RUNNING)),
        *("--max-model-len", str(arguments.context), "--kv-cache-memory-bytes", str(arguments.kv_bytes)),
        *arguments.engine_args.split(),
    )
    process = await asyncio.create_subprocess_exec(
        *(python.parent / "vllm", "serve", prepare_checkpoint("demo").path, *options),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=sys.stderr.fileno() if arguments.verbose else asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(_START_S), aiohttp.ClientSession() as session:
            while not await _is_healthy(session, url):
                if process.returncode is not None:
                    raise RuntimeError("vllm serve ended; --verbose shows what it says")
                await asyncio.sleep(_POLL_S)
        yield url
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def _exposed(state: Path) -> str:
    """The hand-overs in the logs of one system's prefill workers; nothing of a system without any."""
    lines = [line for log in state.glob("logs/prefill-*") for line in log.read_text().splitlines()]
    events = [json.loads(line) for line in lines if '"request.handed_over"' in line]
    if not events:
        return ""
    exposed_ms = sorted(1000 * event["exposed_s"] for event in events)
    largest_mb = max(event["kv_bytes"] for event in events) / 1e6
    median = statistics.median(exposed_ms)
    return (
        f"{state.name}: {len(events)} hand-overs of at most {largest_mb:.0f} MB, "
        f"exposed {median:.0f} ms in the median, {exposed_ms[-1]:.0f} at most\n"
    )


async def run(arguments: argparse.Namespace, state: Path) -> None:
    """Starts the systems, measures and prints."""
    os.environ.update(VLLM_CPU_NUM_OF_RESERVED_CPU="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    python = arguments.python.absolute()
    limits = (
        *("--dtype", arguments.dtype, "--kv-memory", str(arguments.kv_bytes), "--max-running", str(_MAX_RUNNING)),
        *("--set", f"workers.all.max_context_tokens={arguments.context}", "--block-tokens", str(_BLOCK_TOKENS)),
        *("--engine", "vllm", "--engine-python", str(python), f"--engine-args={arguments.engine_args}"),
    )
    async with AsyncExitStack() as stack:
        servers = []
        for name in arguments.systems.split(","):
            if name == "vllm":
                url = await stack.enter_async_context(plain_vllm(python, arguments))
            else:
                system = running_system((*limits, *_SYSTEMS[name]), state / name, len(_SYSTEMS[name]) // 2, _START_S)
                url = await stack.enter_async_context(system)
            servers.append(Server(name, url, "demo"))
        results = await measure(servers, arguments.scenarios.split(","), arguments.repeat)
        exposed = [_exposed(state / name) for name in arguments.systems.split(",")]
    sys.stdout.write(table(results, servers) + "\n" + "".join(exposed))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


def main(words: Sequence[str] | None = None) -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", type=Path, help="interpreter with vLLM, beside which `vllm` is")
    parser.add_argument("--systems", default="vllm,both,1p1d", help="the first is what the others are compared with")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help=f"any of {', '.join(SCENARIOS)}")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--kv-bytes", type=int, default=512 << 20)
    parser.add_argument("--engine-args", default="", help="further options of vLLM, such as --enforce-eager")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value here too")
    parser.add_argument("--verbose", action="store_true", help="show what vLLM says")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="halfmoon-serving-") as directory:
        asyncio.run(run(arguments, Path(directory)))


if __name__ == "__main__":
    main()
