"""Prefill and decode rates of the engine, compared with transformers in the same process and with servers.

    python -m benchmarks.engine --model demo --dtype bfloat16 --repeat 3 [--server vllm=http://127.0.0.1:9000/smollm2]
        [--quantization auto --quantization int4 --llama-cpp /…/llama-batched-bench] [--kv-dtype int8 --kv-dtype fp8]

Subjects take turns within each repeat. Figures are medians; ratios are to transformers, or to our engine with weights
as numbers if quantised weights or KV are measured beside it, and above 1 where the subject is better (for stalls, below
1). Of those it also says how far they are from float32: perplexity of a text, mean KL divergence, share of equal
likeliest tokens, and of 200 questions the greedy answers that are the same.
"sampled" draws with temperature 1 and top-p 0.95, all else is greedy. "colocated" is role `both` at work: eight
sequences decode while a prompt of 2,048 tokens is computed in chunks. It gives the decode rate during that time and
the longest stall of a decode.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import torch

from benchmarks.engine.accuracy import KV, Dtype, print_accuracy
from benchmarks.serving import Client, Server, drop_waiting_policy
from halfmoon.engine.checkpoint.checkpoint import (
    DEMO_MODEL,
    Checkpoint,
    demo_file,
    prepare_checkpoint,
)
from halfmoon.engine.checkpoint.converted import default_cache_dir
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.native.compiler import compiled
from halfmoon.engine.native.library import NativeLibrary
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.errors import Incompatible
from halfmoon.host_limits import num_threads

PREFILL_TOKENS = (128, 512, 2048)
DECODE_BATCHES = (1, 8, 32)
DECODE_CONTEXTS = (2000,)  # of one sequence
SAMPLED_BATCHES = (1, 8)
_DECODE_CONTEXT = 256
_DECODE_STEPS = 24
_KV_BYTES = 1 << 30
_GREEDY = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
_SAMPLED = replace(_GREEDY, temperature=1.0, top_p=0.95)
Figures = dict[str, float]
Subject = Callable[[], Figures]


class EngineSubject:
    """The engine in this process."""

    def __init__(self, checkpoint: Checkpoint, dtype: Dtype, device: str, kv_dtype: KV = "auto") -> None:
        config = EngineConfig(
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            prefix_cache=False,
            max_running=64,
            kv_memory_bytes=_KV_BYTES,
            num_threads=num_threads(),
        )
        self._engine = Engine(checkpoint, config)
        self._rng = random.Random(0)
        self._num_requests = 0

    def measure(self) -> Figures:
        """Measures all figures once."""
        figures = {f"prefill {n} tokens/s": self._prefill(n) for n in PREFILL_TOKENS}
        figures |= {f"decode batch {n} tokens/s": self._decode(n) for n in DECODE_BATCHES}
        figures |= {f"sampled batch {n} tokens/s": self._decode(n, sampling=_SAMPLED) for n in SAMPLED_BATCHES}
        figures |= {f"decode behind {n} tokens/s": self._decode(1, n) for n in DECODE_CONTEXTS}
        figures["tokens of KV in 1 GiB"] = float(self._engine.num_blocks * self._engine.layout.block_tokens)
        return figures | self._colocated(8, 2048)

    def _add(self, num_prompt: int, max_tokens: int, sampling: SamplingParams = _GREEDY) -> str:
        self._num_requests += 1
        prompt = tuple(self._rng.choices(range(1000, 30000), k=num_prompt))
        sampling = replace(sampling, max_tokens=max_tokens)
        self._engine.add(EngineRequest(str(self._num_requests), prompt, sampling))
        return str(self._num_requests)

    def _prefill(self, num_tokens: int) -> float:
        self._add(num_tokens, 1)
        started_s = time.perf_counter()
        while self._engine.has_work():
            self._engine.step()
        return num_tokens / (time.perf_counter() - started_s)

    def _start_decodes(
        self, batch: int, max_tokens: int, context: int = _DECODE_CONTEXT, sampling: SamplingParams = _GREEDY
    ) -> None:
        for _ in range(batch):
            self._add(context, max_tokens, sampling)
        while self._engine.step().num_prefill_tokens or self._engine.stats().num_waiting:
            pass

    def _decode(self, batch: int, context: int = _DECODE_CONTEXT, sampling: SamplingParams = _GREEDY) -> float:
        self._start_decodes(batch, 4096, context, sampling)
        started_s = time.perf_counter()
        for _ in range(_DECODE_STEPS):
            self._engine.step()
        elapsed_s = time.perf_counter() - started_s
        self._engine.cancel_all()
        return batch * _DECODE_STEPS / elapsed_s

    def _colocated(self, batch: int, num_prompt: int) -> Figures:
        self._start_decodes(batch, 4096)
        prefill = self._add(num_prompt, 1)
        started_s, stalls_s, num_tokens, is_done = time.perf_counter(), [0.0], 0, False
        while not is_done:
            result = self._engine.step()
            stalls_s.append(result.duration_s)
            is_done = any(output.request_id == prefill for output in result.outputs)
            num_tokens += len(result.outputs)
        elapsed_s = time.perf_counter() - started_s
        self._engine.cancel_all()
        return {
            "colocated: decode tokens/s": num_tokens / elapsed_s,
            "colocated: prefill tokens/s": num_prompt / elapsed_s,
            "colocated: longest stall ms": 1000 * max(stalls_s),
        }


class TransformersSubject:
    """The reference implementation in this process, with its static choice of attention."""

    def __init__(self, checkpoint: Checkpoint, dtype: Dtype, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=getattr(torch, dtype))
        self._model.to(device).eval()
        self._device = device
        self._rng = random.Random(0)

    @torch.inference_mode()
    def measure(self) -> Figures:
        """Measures prefill and decode rates once. Our engine, with threads of its own, left torch one."""
        left = torch.get_num_threads()
        torch.set_num_threads(num_threads())
        figures = {f"prefill {n} tokens/s": self._prefill(n) for n in PREFILL_TOKENS}
        figures |= {f"decode batch {n} tokens/s": self._decode(n) for n in DECODE_BATCHES}
        torch.set_num_threads(left)
        return figures

    def _prompts(self, batch: int, num_tokens: int) -> torch.Tensor:
        rows = [self._rng.choices(range(1000, 30000), k=num_tokens) for _ in range(batch)]
        return torch.tensor(rows, device=self._device)

    def _prefill(self, num_tokens: int) -> float:
        prompt = self._prompts(1, num_tokens)
        started_s = time.perf_counter()
        int(self._model(prompt, logits_to_keep=1).logits[0, -1].argmax())
        return num_tokens / (time.perf_counter() - started_s)

    def _decode(self, batch: int) -> float:
        out = self._model(self._prompts(batch, _DECODE_CONTEXT), use_cache=True, logits_to_keep=1)
        started_s = time.perf_counter()
        for _ in range(_DECODE_STEPS):
            tokens = out.logits[:, -1].argmax(-1, keepdim=True)
            out = self._model(tokens, past_key_values=out.past_key_values, use_cache=True)
        int(out.logits[0, -1].argmax())
        return batch * _DECODE_STEPS / (time.perf_counter() - started_s)


class LlamaCppSubject:
    """llama.cpp's own `llama-batched-bench` over the model's GGUF file: its engine without a server."""

    def __init__(self, program: Path, model: str) -> None:
        file = demo_file() if model == DEMO_MODEL else Path(model)
        self._command = [str(program), "-m", str(file), "-t", str(num_threads()), "-ub", "512"]

    def measure(self) -> Figures:
        """Measures prefill and decode rates once."""
        figures = {f"prefill {n} tokens/s": self._rate("speed_pp", n, 1) for n in PREFILL_TOKENS}
        return figures | {
            f"decode batch {n} tokens/s": self._rate("speed_tg", _DECODE_CONTEXT, n) for n in DECODE_BATCHES
        }

    def _rate(self, name: str, num_prompt: int, batch: int) -> float:
        context = batch * (num_prompt + 2 * _DECODE_STEPS)
        sizes = ("-npp", num_prompt, "-ntg", _DECODE_STEPS, "-npl", batch, "-c", context)
        command = [*self._command, *map(str, sizes), "--output-format", "jsonl"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return float(next(json.loads(line)[name] for line in lines if line.startswith("{")))


class ServerSubject:
    """Any OpenAI-compatible server, measured through HTTP with its own overhead."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._rng = random.Random(0)

    def measure(self) -> Figures:
        """Prefill rates from the time to first token; decode rates between the last first token and the first end."""
        return asyncio.run(self._measure())

    async def _measure(self) -> Figures:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            client = Client(self._server, session, self._rng)
            figures = {}
            for num_tokens in PREFILL_TOKENS:
                sample = await client.stream(client.prompt(num_tokens), 1)
                figures[f"prefill {num_tokens} tokens/s"] = num_tokens / sample.ttft_s
            for batch in DECODE_BATCHES:
                figures[f"decode batch {batch} tokens/s"] = await self._decode(client, batch)
            return figures

    async def _decode(self, client: Client, batch: int) -> float:
        steps = 2 * _DECODE_STEPS
        prompts = [client.prompt(_DECODE_CONTEXT) for _ in range(batch)]
        samples = await asyncio.gather(*(client.stream(prompt, steps) for prompt in prompts))
        all_run_s = max(sample.ttft_s for sample in samples)  # from here on every sequence decodes
        first_end_s = min(sample.arrivals_s[-1] for sample in samples)
        if first_end_s <= all_run_s:
            return float("nan")
        between = sum(all_run_s < at_s <= first_end_s for sample in samples for at_s in sample.arrivals_s)
        return between / (first_end_s - all_run_s)


def table(results: dict[str, list[Figures]], baseline: str) -> str:
    """Table of medians by figure and subject, with ratios to `baseline`."""
    names = list(results)
    figures = list(dict.fromkeys(figure for rounds in results.values() for figure in rounds[0]))
    lines = [f"{'':28}" + "".join(f"{name:>20}" for name in names)]
    for figure in figures:
        medians = {
            name: statistics.median(run[figure] for run in rounds)
            for name, rounds in results.items()
            if figure in rounds[0]
        }
        cells = []
        for name in names:
            ratio = f"{medians[name] / medians[baseline]:.2f}x" if baseline in medians and name in medians else ""
            cells.append(f"{medians[name]:12.1f} {ratio:>7}" if name in medians else f"{'':20}")
        lines.append(f"{figure:28}" + "".join(cells))
    return "\n".join(lines)


def measure(subjects: dict[str, Subject], repeat: int) -> dict[str, list[Figures]]:
    """Measures every subject in turn, `repeat` times, after one round that does not count."""
    for subject in subjects.values():
        subject()
    results: dict[str, list[Figures]] = {name: [] for name in subjects}
    for _ in range(repeat):
        for name, subject in subjects.items():
            results[name].append(subject())
    return results


def _instructions() -> str:
    """What the CPU kernels multiply bfloat16 with; empty where they cannot be compiled."""
    with suppress(Incompatible):
        library = NativeLibrary(compiled(default_cache_dir()), torch.bfloat16, 1)
        return f", bfloat16 by {library.bf16_instructions or 'widening'}"
    return ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--server", type=Server.parse, action="append", default=[], metavar="NAME=URL/MODEL")
    parser.add_argument("--llama-cpp", type=Path, metavar="PROGRAM", help="llama-batched-bench; needs a GGUF model")
    parser.add_argument("--quantization", choices=("auto", "int8", "int4"), action="append", default=[])
    parser.add_argument("--kv-dtype", choices=("int8", "fp8"), action="append", default=[])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(arguments)
    drop_waiting_policy()
    is_quantised = bool(options.quantization or options.kv_dtype)
    checkpoint = prepare_checkpoint(
        options.model, as_numbers=not is_quantised, quantization="none" if options.quantization else "auto"
    )
    subjects: dict[str, Subject] = {"halfmoon": EngineSubject(checkpoint, options.dtype, options.device).measure}
    if not is_quantised:
        subjects["transformers"] = TransformersSubject(checkpoint, options.dtype, options.device).measure
    for name in options.quantization:
        quantised = prepare_checkpoint(options.model, quantization=name)
        subjects[name] = EngineSubject(quantised, options.dtype, options.device).measure
    for name in options.kv_dtype:
        subjects[f"KV {name}"] = EngineSubject(checkpoint, options.dtype, options.device, name).measure
    if options.llama_cpp is not None:
        subjects["llama.cpp"] = LlamaCppSubject(options.llama_cpp, options.model).measure
    subjects |= {server.name: ServerSubject(server).measure for server in options.server}
    print(f"{checkpoint.name}, {options.dtype}, {options.device}, {num_threads()} threads{_instructions()}")
    print(table(measure(subjects, options.repeat), "halfmoon" if is_quantised else "transformers"))
    if is_quantised:
        print_accuracy(options.model, options.dtype, options.quantization, options.kv_dtype)


if __name__ == "__main__":
    main()
