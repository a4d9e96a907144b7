"""KV that travels in any codec between workers of any dtypes: what is decoded from it is what the model says."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import get_args

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.errors import Incompatible
from halfmoon.kv.codec import LOSSLESS, Codec, encoded_bytes, gainful
from halfmoon.kv.kv_layout import QUANTISED, KVDtype
from halfmoon.pb import prefill_pb2, types_pb2
from halfmoon.rpc.transport import receiving
from halfmoon.worker.servicers.wire import codec_from
from tests.worker.conftest import RunningWorker
from tests.worker.test_handover import generation, listening, prefilled, until

Start = Callable[..., Awaitable[RunningWorker]]
DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)
PROMPT = [(29 * i + 11) % 125 + 3 for i in range(75)]
NUM_TOKENS = 16
HANDED_OVER = [codec for codec in Codec if codec is not Codec.INT2]  # which is for stored blocks

# Of the mean over the decoded tokens of |logprob - that of transformers in float32|.
DTYPE_ERROR: dict[KVDtype, float] = {"float32": 0.0001, "float16": 0.02, "bfloat16": 0.1, "int8": 0.06, "fp8": 0.3}
CODEC_ERROR = {Codec.RAW: 0.0, Codec.LZ4: 0.0, Codec.ZSTD: 0.0, Codec.INT8: 0.06, Codec.FP8: 0.3, Codec.INT4: 0.5}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """In place of the common one: its random weights are large enough for what it attends to to matter."""
    path = tmp_path_factory.mktemp("attentive")
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        eos_token_id=2,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(path)
    return prepare_checkpoint(str(path))


async def decoded(
    prefill: RunningWorker, decode: RunningWorker, codec: Codec, prompt: list[int], *, chooses: bool = False
) -> tuple[list[tuple[int, float]], int]:
    """(token id, logprob) of each token of one request, the first one from the prefill worker; bytes handed over."""
    wanted = generation(prefill.engine.checkpoint, prompt, NUM_TOKENS)
    wanted.sampling.num_top_logprobs = 0
    request = prefill_pb2.PrefillRequest(
        generation=wanted,
        decode_address=decode.peer.address,
        kv_codec=prefill_pb2.KVCodec.Value(codec.name),
        chooses_codec=chooses,
    )
    async with listening(decode) as steps:
        first, done = await prefilled(prefill, request)
        tokens = [first.first_token.token]
        async for step in steps:
            tokens.extend(step.tokens)
            if tokens[-1].finish_reason != types_pb2.NOT_FINISHED:
                break
    return [(token.token_id, token.logprob) for token in tokens], done.handed_over.kv_bytes


def error(checkpoint: Checkpoint, tokens: list[tuple[int, float]], prompt: list[int]) -> float:
    """Mean distance of the logprobs of the tokens that were decoded on KV which had travelled."""
    model = LlamaForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
    ids = [token_id for token_id, _ in tokens]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    return float((torch.tensor([logprob for _, logprob in tokens]) - expected)[1:].abs().mean())


@pytest.mark.parametrize(("sent", "kept"), list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("codec", HANDED_OVER)
async def test_what_is_decoded_is_what_the_model_says(
    start_worker: Start, tiny: Checkpoint, codec: Codec, sent: KVDtype, kept: KVDtype
) -> None:
    prefill = await start_worker("prefill", **dtypes(sent))
    decode = await start_worker("decode", **dtypes(kept))
    tokens, num_bytes = await decoded(prefill, decode, codec, PROMPT)
    tolerance = CODEC_ERROR[codec] + DTYPE_ERROR[sent] + DTYPE_ERROR[kept]
    assert error(tiny, tokens, PROMPT) < tolerance
    assert error(tiny, tokens, PROMPT[-8:]) > tolerance + 0.5  # it would be seen if KV had suffered
    layout = prefill.engine.layout
    shape = (layout.num_layers, 2, layout.num_kv_heads, len(PROMPT), 16)
    if codec in LOSSLESS:
        assert num_bytes <= encoded_bytes(Codec.RAW, shape, sent)
    else:
        assert num_bytes == encoded_bytes(gainful(codec, shape, sent), shape, sent)


def dtypes(kv: KVDtype) -> dict[str, str]:
    """The options of a worker with such KV."""
    return {"dtype": "float32", "kv_dtype": kv} if kv in QUANTISED else {"dtype": kv}


@pytest.mark.parametrize("sent", ["float32", "int8", "fp8"])
@pytest.mark.parametrize("kept", ["float32", "int8", "fp8"])
async def test_kv_that_a_quantised_cache_rounded_is_found_by_no_other_dtype(
    start_worker: Start, tiny: Checkpoint, sent: KVDtype, kept: KVDtype
) -> None:
    prefill = await start_worker("prefill", **dtypes(sent))
    decode = await start_worker("decode", **dtypes(kept))
    sizes = [(await decoded(prefill, decode, Codec.RAW, PROMPT))[1] for _ in range(2)]
    num_held = len(PROMPT) // 8 * 8 if sent in (kept, "float32") else 0
    token_bytes = prefill.engine.layout.token_bytes
    assert sizes == [len(PROMPT) * token_bytes, (len(PROMPT) - num_held) * token_bytes]


async def test_a_codec_that_gains_nothing_is_not_used(start_worker: Start, tiny: Checkpoint) -> None:
    prefill, decode = [await start_worker(role, dtype="bfloat16") for role in ("prefill", "decode")]
    _, num_bytes = await decoded(prefill, decode, Codec.INT4, PROMPT[:1])
    assert num_bytes == prefill.engine.layout.token_bytes
    await until(lambda: prefill.num_used_blocks + decode.num_used_blocks == 0)


async def test_a_codec_that_the_decode_worker_lacks_is_not_used(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "decodable", lambda: frozenset({Codec.RAW, Codec.INT8}))  # as without the packages
    prefill, decode = [await start_worker(role, dtype="bfloat16") for role in ("prefill", "decode")]
    _, num_bytes = await decoded(prefill, decode, Codec.ZSTD, PROMPT)
    assert num_bytes == len(PROMPT) * prefill.engine.layout.token_bytes


async def test_the_choice_of_a_codec_begins_with_raw_kv(start_worker: Start, tiny: Checkpoint) -> None:
    """On a link of 20 KB/s anything smaller is quicker; the first hand-over tells what the link does."""
    prefill = await start_worker("prefill", dtype="bfloat16", link_bytes_per_s=2e5, prefix_cache=False)
    decode = await start_worker("decode", dtype="bfloat16", prefix_cache=False)
    sizes = [(await decoded(prefill, decode, Codec.INT8, PROMPT, chooses=True))[1] for _ in range(2)]
    shape = (3, 2, 2, len(PROMPT), 16)
    assert sizes == [encoded_bytes(codec, shape, "bfloat16") for codec in (Codec.RAW, Codec.INT8)]
    (exact,) = [(await decoded(prefill, decode, Codec.RAW, PROMPT, chooses=True))[1] for _ in range(1)]
    assert sizes[1] < exact < sizes[0]


async def test_a_codec_of_a_later_release_is_refused(start_worker: Start, tiny: Checkpoint) -> None:
    prefill, decode = await start_worker("prefill"), await start_worker("decode")
    request = prefill_pb2.PrefillRequest(
        generation=generation(tiny, PROMPT, 4),
        decode_address=decode.peer.address,
        kv_codec=77,  # type: ignore[arg-type]
    )
    with pytest.raises(Incompatible, match="does not know KV codec 77"):
        await prefilled(prefill, request)
    assert prefill.num_used_blocks + decode.num_used_blocks == 0


def test_the_wire_has_the_codecs_numbers() -> None:
    assert dict(prefill_pb2.KVCodec.items()) == {codec.name: int(codec) for codec in HANDED_OVER}


def test_a_codec_of_stored_blocks_is_refused() -> None:
    with pytest.raises(Incompatible, match="stored blocks"):
        codec_from(Codec.INT2)
