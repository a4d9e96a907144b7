"""`python -m tests.vllm_engine.real_vllm RANKS MODEL REFUSED [NAME=ADAPTER ...]`: what only vLLM itself can show.

It runs in vLLM's environment.

Prints a JSON line for each thing that holds; ends with an error at the first that does not. Then waits to be killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from halfmoon.engine.checkpoint.adapters import Adapter, read_adapters
from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.engine.request import Constraint, EngineRequest, SamplingParams, TokenOutput
from halfmoon.engine.sampler import SamplingRow, ban_and_bias, penalise
from halfmoon.engine.scheduling.restore_order import RestoreOrder
from halfmoon.engine.step_result import BlockChain, StepResult
from halfmoon.errors import Incompatible, InvalidRequest, NoCapacity
from halfmoon.kv.keys import adapter_salt
from halfmoon.kv.kv_layout import KVSlice
from halfmoon.vllm_engine.frontend.engine_arguments import VllmOptions
from halfmoon.vllm_engine.host import VllmHost
from halfmoon.vllm_engine.requests.vllm_engine import VllmEngine

IS_ONE_PROCESS = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"  # vLLM's scheduler and model, as on one GPU
CACHE_TOKENS = 768  # of vLLM's cache
MAX_TOKENS = 12
LENGTHS = (1, 63, 64, 65, 200, 300)


class Checks:
    """One engine and the tokens that it gave; transformers' greedy tokens to compare with."""

    def __init__(self, model: Path, adapters: Sequence[Adapter] = ()) -> None:
        from transformers import AutoModelForCausalLM

        self.model = model
        self.is_latent = "kv_lora_rank" in json.loads((model / "config.json").read_text())
        load = partial(AutoModelForCausalLM.from_pretrained, model, dtype=torch.float32)
        self.reference = load()
        self.references = {"": self.reference, **{one.fingerprint: merged(load(), one) for one in adapters}}
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.num_preempted = 0
        self.num_held = 0
        self.chains: dict[str, BlockChain] = {}  # the latest of each request
        self.num_cached: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._names = count()
        self._expected: dict[tuple[tuple[int, ...], int, str], list[int]] = {}

    def on_step(self, step: StepResult) -> None:
        self.num_preempted += step.num_preempted
        self.num_cached |= step.num_cached_tokens
        self.chains |= {chain.request_id: chain for chain in step.chains}
        for output in step.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self._changed.set()

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), 0.1)  # counts change without a step, too
            except TimeoutError:
                continue

    async def expected(
        self, engine: VllmEngine, prompt: tuple[int, ...], max_tokens: int, adapter: str = ""
    ) -> list[int]:
        """transformers' greedy tokens; for latent attention, which vLLM computes differently, its own in one piece."""
        key = (prompt, max_tokens, adapter)
        if key not in self._expected and self.is_latent:
            name = f"whole-{next(self._names)}"
            await engine.add(EngineRequest(name, prompt, greedy(max_tokens), tenant_salt=name.encode()))
            self._expected[key] = await self.tokens(name, max_tokens)
        elif key not in self._expected:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                whole = self.references[adapter].generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
                )
            self._expected[key] = whole[0, len(prompt) :].tolist()
        return self._expected[key]

    def has_clear_experts(self, prompt: tuple[int, ...]) -> bool:
        """Whether no token's experts depend on how sums are rounded. True for a model without experts."""
        with torch.inference_mode():
            routers = self.reference(torch.tensor([prompt]), output_router_logits=True).get("router_logits") or ()
        used = getattr(self.reference.config, "num_experts_per_tok", 0)
        chances = (logits.softmax(-1).sort(descending=True).values for logits in routers)
        return all(bool((by_rank[:, used - 1] - by_rank[:, used] > 1e-4).all()) for by_rank in chances)

    async def tokens(self, name: str, num_tokens: int) -> list[int]:
        def is_done() -> bool:
            found = self.outputs.get(name, [])
            return len(found) >= num_tokens or (bool(found) and found[-1].finish_reason is not None)

        await self.until(is_done)
        return [output.token_id for output in self.outputs[name]]

    def has_chain(self, request_id: str, num_blocks: int) -> bool:
        return request_id in self.chains and len(self.chains[request_id].keys) == num_blocks

    async def prefilled(
        self, engine: VllmEngine, prompt: tuple[int, ...], max_tokens: int, salt: bytes = b""
    ) -> tuple[int, torch.Tensor]:
        """First token and KV, [layers, 2, heads, tokens, head_dim], of a prompt."""
        name = self.latest = f"prefill-{next(self._names)}"
        request = EngineRequest(name, prompt, greedy(max_tokens), prefill_only=True, tenant_salt=salt)
        await engine.add(request, lambda _: None)
        (first,) = await self.tokens(name, 1)
        assert name in self.num_cached, "its step was not reported before its token"
        layers = engine.layout.num_layers
        kv = bytearray(await engine.kv_read(name, KVSlice(0, layers, 0, len(prompt))))
        await engine.cancel(name)
        return first, torch.frombuffer(kv, dtype=torch.float32).view(engine.layout.shape(layers, len(prompt)))

    def penalised(self, prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
        """Tokens of transformers' logits under our own adjustments."""
        ids = list(prompt)
        while len(ids) < len(prompt) + sampling.max_tokens:
            with torch.inference_mode():
                logits = self.reference(torch.tensor([ids])).logits[0, -1].clone()
                row = SamplingRow(sampling, ids, len(prompt))
                ban_and_bias(logits, row, frozenset({2}))
                penalise(logits, row)
                ids.append(int(logits.argmax()))
        return ids[len(prompt) :]

    async def received(
        self,
        engine: VllmEngine,
        prompt: tuple[int, ...],
        sampling: int | SamplingParams,
        kv: torch.Tensor,
        salt: bytes = b"",
    ) -> str:
        """Reserves room as soon as there is some, and writes what vLLM's cache lacks. sampling: or tokens, greedily."""
        sampling = greedy(sampling) if isinstance(sampling, int) else sampling
        name = f"decode-{next(self._names)}"
        while True:
            try:
                held = await engine.reserve(EngineRequest(name, prompt, sampling, tenant_salt=salt))
                break
            except NoCapacity:
                await asyncio.sleep(0.01)
        self.num_held += held
        if held < len(prompt):
            rest = kv[:, :, :, held:].contiguous().numpy().tobytes()
            await engine.kv_write(name, KVSlice(0, engine.layout.num_layers, held, len(prompt) - held), rest)
        return name


def merged(model: torch.nn.Module, adapter: Adapter) -> torch.nn.Module:
    """The model with the adapter's changes in its weights."""
    values = load_file(adapter.path / "adapter_model.safetensors")
    scale = json.loads((adapter.path / "adapter_config.json").read_text())["lora_alpha"] / adapter.rank
    for name in (name.removesuffix(".lora_A.weight") for name in values if name.endswith(".lora_A.weight")):
        module = model.get_submodule(name.removeprefix("base_model.model."))
        module.weight.data += scale * values[f"{name}.lora_B.weight"] @ values[f"{name}.lora_A.weight"]
    return model


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((37 * token + 101 * seed + 11) % 40_000 + 5 for token in range(length))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


async def handed_over(checks: Checks, engine: VllmEngine) -> None:
    for length in LENGTHS:
        prompt = prompt_of(length)
        expected = await checks.expected(engine, prompt, MAX_TOKENS)
        for salt in (b"", f"salt {length}".encode()):  # with the prefill's own, vLLM has the prompt's blocks
            first, kv = await checks.prefilled(engine, prompt, MAX_TOKENS)
            assert first == expected[0], (length, first, expected)
            if (
                length >= engine.layout.block_tokens and not checks.is_latent
            ):  # the events of vLLM's cache come on their own
                await checks.until(partial(engine._names.depth, prompt, b""))
            name = await checks.received(engine, prompt, MAX_TOKENS, kv, salt)
            await engine.start(name, first)
            assert [first, *await checks.tokens(name, MAX_TOKENS - 1)] == expected, (length, expected)
    assert checks.num_held > 0 or checks.is_latent, "nothing was found in vLLM's cache"


async def computed_where_held_blocks_were_evicted(checks: Checks, engine: VllmEngine) -> None:
    prompt = prompt_of(300, 3)
    expected, before = await checks.expected(engine, prompt, MAX_TOKENS), checks.num_held
    first, kv = await checks.prefilled(engine, prompt, MAX_TOKENS)
    await checks.until(partial(engine._names.depth, prompt, b""))
    name = await checks.received(engine, prompt, MAX_TOKENS, kv)
    assert checks.num_held > before
    for seed in range(4, 8):
        await checks.prefilled(engine, prompt_of(400, seed), MAX_TOKENS)
    await engine.start(name, first)
    assert await checks.tokens(name, MAX_TOKENS - 1) == expected[1:]


async def preempted(checks: Checks, engine: VllmEngine) -> None:
    """Received KV is lost when vLLM takes the blocks back, and is computed again."""
    prompts = [prompt_of(100, seed) for seed in range(5)]  # 2 blocks each, 3 in the end
    expected = [await checks.expected(engine, prompt, 60) for prompt in prompts]
    handed = [await checks.prefilled(engine, prompt, 60) for prompt in prompts]
    names = [
        await checks.received(engine, prompt, 60, kv, str(seed).encode())
        for seed, (prompt, (_, kv)) in enumerate(zip(prompts, handed, strict=True))
    ]
    for name, (first, _) in zip(names, handed, strict=True):
        await engine.start(name, first)
    before = checks.num_preempted
    for name, wanted in zip(names, expected, strict=True):
        assert await checks.tokens(name, 59) == wanted[1:], name
    assert checks.num_preempted > before, "the test preempted nothing"


async def computed_where_loading_failed(checks: Checks, engine: VllmEngine) -> None:
    prompt = prompt_of(150, 9)
    expected = await checks.expected(engine, prompt, MAX_TOKENS)
    _, kv = await checks.prefilled(engine, prompt, MAX_TOKENS)
    name = await checks.received(engine, prompt, MAX_TOKENS, torch.zeros_like(kv), b"failing")
    engine._blocks._stamps.zero_()  # as if the blocks were in another use
    await engine.start(name, expected[0])
    assert await checks.tokens(name, MAX_TOKENS - 1) == expected[1:]


async def restored(checks: Checks, engine: VllmEngine) -> None:
    """Blocks of a pool are loaded, and vLLM computes behind them; a missing one is computed with all after it."""
    prompt, size = prompt_of(300, 12), engine.layout.block_tokens
    expected = (await checks.expected(engine, prompt, MAX_TOKENS))[0]
    _, kv = await checks.prefilled(engine, prompt, MAX_TOKENS)
    num_blocks = 299 // size
    for missing in (None, 1):
        began, name = asyncio.Event(), f"restored-{missing}"
        request = EngineRequest(name, prompt, greedy(MAX_TOKENS), prefill_only=True, tenant_salt=name.encode())
        order = RestoreOrder(num_blocks, 0, partial(_set, began))
        await engine.add(request, lambda _: None, order)
        await began.wait()
        for block in reversed(range(num_blocks)):
            if block != missing:
                cells = kv[:, :, :, block * size : (block + 1) * size].contiguous().numpy().tobytes()
                await engine.load_block(name, block, cells)
                engine.note_loaded(name, [block])
        engine.note_loaded(name, (), range(num_blocks))
        assert await checks.tokens(name, 1) == [expected]
        again = bytearray(await engine.kv_read(name, KVSlice(0, engine.layout.num_layers, 0, 300)))
        assert torch.allclose(torch.frombuffer(again, dtype=torch.float32).view(kv.shape), kv, atol=1e-4)
        assert checks.num_cached[name] == 0
        await engine.cancel(name)


async def answers_are_kept(checks: Checks, engine: VllmEngine) -> None:
    """An answer's whole blocks come into the shared memory at its end, and a prefix loaded from them is the same."""
    prompt, size = prompt_of(100, 40), engine.layout.block_tokens
    expected = await checks.expected(engine, prompt, 110)
    _, kv = await checks.prefilled(engine, prompt, 110)
    name = await checks.received(engine, prompt, 110, kv, b"handed over")
    await engine.start(name, expected[0])
    await engine.add(EngineRequest("alone", prompt, greedy(110), tenant_salt=b"alone"))
    assert await checks.tokens(name, 109) == expected[1:]
    assert await checks.tokens("alone", 110) == expected
    tokens = (*prompt, *expected)
    num_blocks = (len(tokens) - 1) // size
    for request in (name, "alone"):
        await checks.until(partial(checks.has_chain, request, num_blocks))
        async with engine.cached(checks.chains[request].keys) as blocks:
            assert len(blocks) == num_blocks
            cells = [bytes(await engine.read_block(block)) for block in blocks]
        began, again = asyncio.Event(), f"again-{request}"
        follow_up = EngineRequest(again, tokens, greedy(MAX_TOKENS), prefill_only=True, tenant_salt=again.encode())
        await engine.add(follow_up, lambda _: None, RestoreOrder(num_blocks, 0, partial(_set, began)))
        await began.wait()
        for block, content in enumerate(cells):
            await engine.load_block(again, block, content)
        engine.note_loaded(again, range(num_blocks))
        assert await checks.tokens(again, 1) == (await checks.expected(engine, tokens, 2))[:1]
        kept = bytearray(await engine.kv_read(again, KVSlice(0, engine.layout.num_layers, 0, len(tokens))))
        await engine.cancel(again)
        _, computed = await checks.prefilled(engine, tokens, 2)
        assert torch.allclose(torch.frombuffer(kept, dtype=torch.float32).view(computed.shape), computed, atol=1e-3)


async def log_probabilities_of_a_prompt(checks: Checks, engine: VllmEngine) -> None:
    prompt = next(prompt for prompt in (prompt_of(200, seed) for seed in count(41)) if checks.has_clear_experts(prompt))
    await checks.prefilled(engine, prompt, 2)  # known, and computed nevertheless
    with torch.inference_mode():
        known = checks.reference(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    asked = replace(greedy(2), num_prompt_logprobs=2, num_top_logprobs=1)
    await engine.add(EngineRequest("scored", prompt, asked))
    await checks.tokens("scored", 2)
    first, second = checks.outputs["scored"]
    assert [len(output.logprobs.top) for output in (first, second) if output.logprobs] == [1, 1]
    assert (len(first.prompt_logprobs), second.prompt_logprobs) == (199, ())
    for found, row, token in zip(first.prompt_logprobs, known, prompt[1:], strict=True):
        assert abs(found.logprob - float(row[token])) < 1e-3
        above, below = (int((row > row[token] + margin).sum()) for margin in (1e-3, -1e-3))
        assert above < found.rank <= below + 1  # float32 is not exact, and many are close
        assert torch.allclose(torch.tensor([value for _, value in found.top]), row.topk(2).values, atol=1e-3)


def _set(event: asyncio.Event, num_tokens: int, num_loaded: int) -> None:
    event.set()


async def drawn_by_our_sampler(checks: Checks, engine: VllmEngine) -> None:
    """Penalties count the tokens before a hand-over, and a structure goes on behind it."""
    prompt = prompt_of(90, 11)
    first, kv = await checks.prefilled(engine, prompt, MAX_TOKENS)
    penalised = replace(greedy(MAX_TOKENS), frequency_penalty=1.5, presence_penalty=0.5)
    name = await checks.received(engine, prompt, penalised, kv, b"penalised")
    await engine.start(name, first)
    assert [first, *await checks.tokens(name, MAX_TOKENS - 1)] == checks.penalised(prompt, penalised)
    digits = replace(greedy(40), constraint=Constraint("regex", "[0-9]{4,6}"))
    tokenizer = Tokenizer.from_file(str(checks.model / "tokenizer.json"))
    await engine.add(EngineRequest("structure", prompt, digits, prefill_only=True), lambda _: None)
    (first,) = await checks.tokens("structure", 1)
    await engine.cancel("structure")
    name = await checks.received(engine, prompt, digits, kv, b"structure")
    await engine.start(name, first)
    found = [first, *await checks.tokens(name, 40)]
    assert checks.outputs[name][-1].finish_reason == "stop"
    text = tokenizer.decode(found[:-1])
    assert text.isdigit(), text
    assert 4 <= len(text) <= 6, text


async def drawn_with_a_seed(checks: Checks, engine: VllmEngine) -> None:
    """Of a prompt of several steps, too."""
    prompt = next(prompt for prompt in (prompt_of(300, seed) for seed in count(50)) if checks.has_clear_experts(prompt))
    seeded, firsts = SamplingParams(max_tokens=MAX_TOKENS, seed=7, ignore_eos=True), []
    for name in ("seeded", "seeded again"):
        await engine.add(EngineRequest(name, prompt, seeded))
        first, *others = await checks.tokens(name, MAX_TOKENS)
        assert len(others) == MAX_TOKENS - 1
        firsts.append(first)
    assert firsts[0] == firsts[1]


async def refused_before_anything_is_reserved(checks: Checks, engine: VllmEngine) -> None:
    for ask in (engine.reserve, engine.add):
        with suppress(InvalidRequest):
            await ask(EngineRequest("refused", prompt_of(9), replace(greedy(9), num_top_logprobs=21)))
            raise AssertionError("vLLM gives no more than 20 log-probabilities")
    assert engine.stats_now().num_reserved == 0


async def ended_where_a_structure_allows_nothing(checks: Checks, engine: VllmEngine) -> None:
    broken = replace(greedy(9), constraint=Constraint("regex", "a("))
    await engine.add(EngineRequest("broken", prompt_of(9), broken))
    await checks.tokens("broken", 1)
    assert checks.outputs["broken"][-1].finish_reason in ("constraint", "error")


async def computed_with_each_adapter(checks: Checks, engine: VllmEngine) -> None:
    """Each gives the text of the weights that it changes, and its KV serves nobody else."""
    prompt, texts = prompt_of(200, 30), set()
    for adapter in checks.references:
        salt = adapter_salt(adapter, b"")
        expected = await checks.expected(engine, prompt, MAX_TOKENS, adapter)
        first, kv = await checks.prefilled(engine, prompt, MAX_TOKENS, salt)
        assert checks.num_cached[checks.latest] == 0
        name = await checks.received(engine, prompt, MAX_TOKENS, kv, salt + b"elsewhere")
        await engine.start(name, first)
        assert [first, *await checks.tokens(name, MAX_TOKENS - 1)] == expected
        again, same = await checks.prefilled(engine, prompt, MAX_TOKENS, salt)
        assert checks.num_cached[checks.latest] == 192
        assert again == first
        assert torch.allclose(same, kv, atol=1e-4)
        texts.add(tuple(expected))
    assert len(texts) == len(checks.references)


async def cancelled_in_every_state(checks: Checks, engine: VllmEngine) -> None:
    prompt = prompt_of(300, 5)
    _, kv = await checks.prefilled(engine, prompt, 40)
    reserved = await checks.received(engine, prompt[:100], 40, kv[:, :, :, :100])
    await engine.cancel(reserved)
    running = await checks.received(engine, prompt, 40, kv)
    await engine.start(running, 77)
    await checks.tokens(running, 2)
    await engine.cancel(running)
    for number in range(6):  # waiting and computing
        await engine.add(
            EngineRequest(f"c-{number}", prompt_of(300, 20 + number), greedy(9), prefill_only=True), lambda _: None
        )
    await checks.until(lambda: engine.stats_now().num_free_blocks < engine.stats_now().num_blocks - 1)
    for number in range(6):
        assert await engine.cancel(f"c-{number}")


async def nothing_is_left(checks: Checks, engine: VllmEngine) -> None:
    await checks.until(lambda: engine._blocks.num_free == engine._blocks.num_blocks)
    await checks.until(lambda: engine.stats_now().num_free_blocks == engine.stats_now().num_blocks)


CHECKS: tuple[Callable[[Checks, VllmEngine], Awaitable[None]], ...] = (
    handed_over,
    computed_where_held_blocks_were_evicted,
    preempted,
    computed_where_loading_failed,
    restored,
    drawn_by_our_sampler,
    drawn_with_a_seed,
    computed_with_each_adapter,
    answers_are_kept,
    log_probabilities_of_a_prompt,
    refused_before_anything_is_reserved,
    ended_where_a_structure_allows_nothing,
    cancelled_in_every_state,
    nothing_is_left,
)

# On CPUs vLLM's kernels for latent attention do not agree: what an answer's token is computed as decides on the next,
# so nothing is compared that computes answers again as prompts. Nor are such blocks reported as cached there.
LATENT_CHECKS = (handed_over, cancelled_in_every_state, nothing_is_left)


def options(
    model: Path, kv_memory_bytes: int, block_tokens: int = 64, ranks: int = 1, adapters: tuple[Adapter, ...] = ()
) -> VllmOptions:
    return VllmOptions(
        str(model),
        block_tokens=block_tokens,
        tensor_parallel=ranks,
        dtype="float32",
        max_context_tokens=512,
        max_running=8,
        max_batch_tokens=128,
        kv_memory_bytes=kv_memory_bytes,
        engine_args=f"--enforce-eager --distributed-executor-backend {'uni' if IS_ONE_PROCESS else 'mp'}",
        adapters=adapters,
    )


def say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def died(reason: BaseException) -> None:
    say(died=str(reason))
    os._exit(1)


async def main(ranks: int, model: Path, refused: Path, lora: Sequence[str]) -> None:
    try:
        VllmHost(prepare_checkpoint(str(refused), for_any_engine=True), options(refused, 1 << 20), 1 << 20)
    except Incompatible as error:
        say(refused=error.message)
    checkpoint = prepare_checkpoint(str(model), for_any_engine=True)
    config = json.loads((model / "config.json").read_text())
    is_latent = "kv_lora_rank" in config
    width = 512 + 64 if is_latent else 2 * config["num_key_value_heads"] * config["head_dim"]
    block_tokens = 16 if is_latent else 64
    block_bytes, num_blocks = block_tokens * config["num_hidden_layers"] * width * 4, CACHE_TOKENS // block_tokens
    ranks_bytes = (num_blocks + 1) * block_bytes // min(ranks, config["num_key_value_heads"])
    adapters = read_adapters(lora)
    asked = options(model, ranks_bytes, block_tokens, ranks, adapters)
    host = await asyncio.to_thread(VllmHost, checkpoint, asked, (num_blocks + 2) * block_bytes)
    checks = Checks(model, adapters)
    async with host.running(checks.on_step, died) as engine:
        assert host.facts.num_blocks == num_blocks
        for check in LATENT_CHECKS if checks.is_latent else CHECKS:
            await asyncio.wait_for(check(checks, engine), 180)
            say(holds=check.__name__)
        say(holds="everything")
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
