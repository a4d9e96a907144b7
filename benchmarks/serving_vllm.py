"""Plain `vllm serve` and Halfmoon over vLLM or over its own engine, in turns by `benchmarks.serving`, started here.

    python -m benchmarks.serving_vllm .venv-vllm/bin/python --repeat 3
    python -m benchmarks.serving_vllm .venv-vllm/bin/python --systems vllm,own-both,own-1p1d
    python -m benchmarks.serving_vllm .venv-vllm/bin/python --systems llama,own-blocks --llama-server /…/llama-server

`both` and `1p1d` compute by vLLM, `own-both` and `own-1p1d` by our engine on the same numbers, `own-blocks` by ours on
the demo's GGUF file as it is, as does `llama`: llama.cpp's server, with a thread for each core.
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
from benchmarks.serving import SCENARIOS, Server, add_sampling, drop_waiting_policy, measure, table
from halfmoon.engine.checkpoint.checkpoint import demo_file, prepare_checkpoint

_START_S = 900.0
_LLAMA_SLOTS = 24  # as many as come at once
_POLL_S = 0.5
_BLOCK_TOKENS, _MAX_RUNNING = 64, 64
_BOTH, _APART = ("--both", "1"), ("--prefill", "1", "--decode", "1")
_OVER_VLLM = {"both": _BOTH, "1p1d": _APART}
_SYSTEMS = {
    **_OVER_VLLM,
    "own-both": (*_BOTH, "--quantization", "none"),
    "own-1p1d": (*_APART, "--quantization", "none"),
    "own-blocks": _BOTH,
}


@asynccontextmanager
async def plain_vllm(python: Path, arguments: argparse.Namespace) -> AsyncIterator[str]:
    """Yields the URL of a `vllm serve` with our workers' options."""
    port = free_port()
    options = (
        *("--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port), "--dtype", arguments.dtype),
        *("--block-size", str(_BLOCK_TOKENS), "--max-num-seqs", str(_MAX_RUNNING)),
        *("--max-model-len", str(arguments.context), "--kv-cache-memory-bytes", str(arguments.kv_bytes)),
        *arguments.engine_args.split(),
    )
    program = python.parent / "vllm"
    model = prepare_checkpoint("demo", as_numbers=True).path
    async with _started([program, "serve", model, *options], port, arguments.verbose) as url:
        yield url


@asynccontextmanager
async def llama_server(arguments: argparse.Namespace) -> AsyncIterator[str]:
    """Yields the URL of llama.cpp's server over the demo's GGUF file."""
    port, threads = free_port(), str(os.cpu_count() or 1)
    options = (
        *("--model", str(demo_file()), "--alias", "demo", "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", threads, "--threads-batch", threads, "--parallel", str(_LLAMA_SLOTS)),
        *("--ctx-size", str(_LLAMA_SLOTS * arguments.context)),
    )
    async with _started([arguments.llama_server, *options], port, arguments.verbose) as url:
        yield url


@asynccontextmanager
async def _started(command: Sequence[str | Path], port: int, verbose: bool) -> AsyncIterator[str]:
    """Runs a server until the end. Raises TimeoutError if it is not ready in time, RuntimeError if it ends itself."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=sys.stderr.fileno() if verbose else asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(_START_S), aiohttp.ClientSession() as session:
            while not await _is_healthy(session, url):
                if process.returncode is not None:
                    raise RuntimeError(f"{Path(command[0]).name} ended; --verbose shows what it says")
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
    drop_waiting_policy()
    python = arguments.python.absolute()
    limits = (
        *("--dtype", arguments.dtype, "--kv-memory", str(arguments.kv_bytes), "--max-running", str(_MAX_RUNNING)),
        *("--set", f"workers.all.max_context_tokens={arguments.context}", "--block-tokens", str(_BLOCK_TOKENS)),
    )
    by_vllm = ("--engine", "vllm", "--engine-python", str(python), f"--engine-args={arguments.engine_args}")
    async with AsyncExitStack() as stack:
        servers = []
        for name in arguments.systems.split(","):
            if name == "vllm":
                url = await stack.enter_async_context(plain_vllm(python, arguments))
            elif name == "llama":
                url = await stack.enter_async_context(llama_server(arguments))
            else:
                options = (*limits, *_SYSTEMS[name], *(by_vllm if name in _OVER_VLLM else ()))
                system = running_system(options, state / name, 2 if "1p1d" in name else 1, _START_S)
                url = await stack.enter_async_context(system)
            servers.append(Server(name, url, "demo"))
        results = await measure(servers, arguments.scenarios.split(","), arguments.repeat, arguments.sampling)
        exposed = [_exposed(state / name) for name in arguments.systems.split(",")]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    sys.stdout.write(table(results, servers) + "\n" + "".join(exposed))


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", type=Path, help="interpreter with vLLM, beside which `vllm` is")
    parser.add_argument("--systems", default="vllm,both,1p1d", help="the first is what the others are compared with")
    parser.add_argument("--llama-server", type=Path, metavar="PROGRAM", help="llama.cpp's server, for the system llama")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help=f"any of {', '.join(SCENARIOS)}")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--kv-bytes", type=int, default=512 << 20)
    parser.add_argument("--engine-args", default="", help="further options of vLLM, such as --enforce-eager")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value here too")
    add_sampling(parser)
    parser.add_argument("--verbose", action="store_true", help="show what vLLM says")
    arguments = parser.parse_args()
    unknown = set(arguments.systems.split(",")) - {"vllm", "llama", *_SYSTEMS}
    if unknown:
        parser.error(f"unknown systems {sorted(unknown)}; known: vllm, llama, {', '.join(_SYSTEMS)}")
    if "llama" in arguments.systems.split(",") and arguments.llama_server is None:
        parser.error("the system llama needs --llama-server")
    with tempfile.TemporaryDirectory(prefix="halfmoon-serving-") as directory:
        asyncio.run(run(arguments, Path(directory)))


if __name__ == "__main__":
    main()
