"""What a smaller KV cache saves: memory, bytes of a hand-over and time of decode steps, and what choosing costs.

    python -m benchmarks.smaller_cache_steps --tokens 4096 --policies sinks:4+252 snapkv:192+64
    python -m benchmarks.smaller_cache_steps --facts 24

An engine for each policy and one without computes the same prompt of random tokens; then they decode by turns. `KV`: of
the sequence while it decodes, and so of a hand-over at the end of the prompt. `prompt`, `step`: processor time of all
threads, so that others on the machine count little: s for a whole prompt and ms for a decode step, medians.

`--facts`: instead, of how many prompts with planted facts the engine says the number, when "The secret number of Alice
is" ends the prompt.
"""

from __future__ import annotations

import argparse
import random
import time
from itertools import chain
from statistics import median

from benchmarks.planted_facts import prompts
from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.text.tokenizer import Tokenizer
from halfmoon.kv.kv_policy import WHOLE, parse_kv_policy, policy_salt

_BLOCK_TOKENS = 64


def new_engine(checkpoint: Checkpoint, num_tokens: int) -> Engine:
    """An engine for one sequence, and twice its blocks."""
    num_blocks = 2 * num_tokens // _BLOCK_TOKENS + 2
    return Engine(checkpoint, EngineConfig(num_blocks=num_blocks, block_tokens=_BLOCK_TOKENS, prefix_cache=False))


def prefill_s(engine: Engine, request: EngineRequest) -> float:
    """Computes a prompt; returns the processor time."""
    engine.add(request)
    began_s = time.process_time()
    while not engine.step().outputs:
        continue
    return time.process_time() - began_s


def decode_s(engine: Engine) -> float:
    """Runs one step; returns the processor time."""
    began_s = time.process_time()
    engine.step()
    return time.process_time() - began_s


def print_recalled(checkpoint: Checkpoint, texts: list[str], num_prompts: int) -> None:
    """Prints how many numbers are said under each policy."""
    engine, tokenizer = new_engine(checkpoint, 1024), Tokenizer(checkpoint)
    said = dict.fromkeys(texts, 0)
    for number, prompt in enumerate(prompts(tokenizer, num_prompts, num_documents=4, num_tokens=128)):
        token_ids = (*prompt.system, *chain(*prompt.documents), *prompt.question, *prompt.opening)
        sampling = SamplingParams(max_tokens=len(prompt.number), temperature=0.0, ignore_eos=True)
        for text in texts:
            salt = policy_salt(parse_kv_policy(text), b"")
            engine.add(EngineRequest(f"{number} {text}", token_ids, sampling, tenant_salt=salt))
            outputs = []
            while engine.has_work():
                outputs += [output.token_id for output in engine.step().outputs]
            said[text] += outputs == prompt.number
    print("| policy | recall |\n|---|---|")
    for text, num in said.items():
        print(f"| {text} | {num} of {num_prompts} |")


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--policies", nargs="+", default=["sinks:4+252", "snapkv:192+64"])
    parser.add_argument("--facts", type=int, default=0, help="prompts")
    options = parser.parse_args()
    checkpoint = prepare_checkpoint(options.model)
    texts = [WHOLE, *options.policies]
    if options.facts:
        print_recalled(checkpoint, texts, options.facts)
        return
    engines = [new_engine(checkpoint, options.tokens + options.steps) for _ in texts]
    draw = random.Random(1)
    sampling = SamplingParams(max_tokens=options.steps + 1, temperature=0.0, ignore_eos=True)
    prompts_s: list[list[float]] = [[] for _ in texts]
    steps_s: list[list[float]] = [[] for _ in texts]
    for number in range(options.repeat):
        prompt = tuple(draw.randrange(1000, 40000) for _ in range(options.tokens))
        for engine, text, measured_s in zip(engines, texts, prompts_s, strict=True):
            salt = policy_salt(parse_kv_policy(text), b"")
            measured_s.append(prefill_s(engine, EngineRequest(str(number), prompt, sampling, tenant_salt=salt)))
        used = [engine.num_blocks - engine.stats().num_free_blocks for engine in engines]
        for _ in range(options.steps):
            for engine, measured_s in zip(engines, steps_s, strict=True):
                measured_s.append(decode_s(engine))
    print("| policy | KV MB | of whole | prompt s | of whole | step ms | of whole |\n|---|---|---|---|---|---|---|")
    for row in zip(texts, used, map(median, prompts_s), map(median, steps_s), strict=True):
        text, num_blocks, prompt_s, step_s = row
        mb = num_blocks * engines[0].layout.block_bytes / 1e6
        shares = num_blocks / used[0], prompt_s / median(prompts_s[0]), step_s / median(steps_s[0])
        cells = f"{mb:.1f}", f"{shares[0]:.0%}", f"{prompt_s:.2f}", f"{shares[1]:.0%}", f"{1e3 * step_s:.1f}"
        print(f"| {text} | {' | '.join(cells)} | {shares[2]:.0%} |")


if __name__ == "__main__":
    main()
