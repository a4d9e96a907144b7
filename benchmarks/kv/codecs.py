"""KV codecs on real KV: size, speed, and effect on the next tokens.

    python -m benchmarks.kv.codecs --model demo --prefixes 5 --repeat 5

KV is that of English prose (Python's language reference, which comes with every Python) after `--tokens` tokens, in
bfloat16, computed in float32. The next `--next` tokens of the text are read on top of each codec's decoded KV.
KL(bfloat16 KV, codec) in nats and agreement of the likeliest token are means over them. Speeds are those of one thread
by its processor time, in bytes of bfloat16 KV, over frames as cut by a hand-over; medians of rounds in which the codecs
take turns, compared with a copy of the same bytes in the same round. int2 is applied as in the store: blocks of 64
tokens, with the last 128 tokens unchanged, which its ratio counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.text.tokenizer import Tokenizer
from halfmoon.kv.codec import Codec, decode, encode
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.frame import plan_frames
from halfmoon.kv.kv_layout import KVLayout

_BLOCK_TOKENS = 64

Bits = NDArray[Any]  # [layers, 2, heads, tokens, head_dim]


@dataclass(slots=True)
class CodecResult:
    """Measurements of one codec."""

    kl: list[float] = field(default_factory=list)  # by token
    agrees: list[bool] = field(default_factory=list)
    in_s: list[float] = field(default_factory=list)  # for all frames, by round
    out_s: list[float] = field(default_factory=list)


class Model:
    """The reference implementation, for logits on top of a given cache."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def kv(self, token_ids: Sequence[int]) -> Bits:
        """KV in canonical order, rounded to bfloat16."""
        cache = self._model(torch.tensor([token_ids]), use_cache=True, logits_to_keep=1).past_key_values
        layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
        return torch.stack(layers).bfloat16().view(torch.int16).numpy()

    @torch.inference_mode()
    def log_probs(self, kv: Bits, token_ids: Sequence[int]) -> Tensor:
        """Log probabilities [tokens, vocabulary] after each of `token_ids` on top of `kv`."""
        values = torch.from_numpy(kv.view(np.int16)).view(torch.bfloat16).float()
        cache = DynamicCache()
        for index, (keys, others) in enumerate(values):
            cache.update(keys[None], others[None], index)
        logits = self._model(torch.tensor([token_ids]), past_key_values=cache, use_cache=True).logits
        return torch.log_softmax(logits[0], -1)


def texts(tokenizer: Tokenizer, num_texts: int, num_tokens: int) -> list[list[int]]:
    """`num_texts` different passages of `num_tokens` tokens each."""
    prose = sorted((text for text in topics.values()), key=len, reverse=True)
    passages = [tokenizer.encode(text)[:num_tokens] for text in prose[:num_texts]]
    assert all(len(text) == num_tokens for text in passages), "the passages are not long enough"
    return passages


def lossy(codec: Codec, kv: Bits) -> Bits:
    """A prompt's KV after encoding and decoding."""
    if not (window := EntryCodec(codec).residual_tokens):
        return decode(codec, encode(codec, kv, "bfloat16"), kv.shape, "bfloat16")
    blocks = blocks_of(kv, window)
    parts = [decode(codec, encode(codec, block, "bfloat16"), block.shape, "bfloat16") for block in blocks]
    return np.concatenate([*parts, kv[:, :, :, -window:].view(np.uint16)], axis=3)


def blocks_of(kv: Bits, window: int) -> list[Bits]:
    """Whole blocks before the last `window` tokens."""
    starts = range(0, kv.shape[3] - window, _BLOCK_TOKENS)
    return [np.ascontiguousarray(kv[:, :, :, start : start + _BLOCK_TOKENS]) for start in starts]


def ratio_of(codec: Codec, kv: Bits, frames: Sequence[Bits]) -> float:
    """Compression ratio of a prompt."""
    if not (window := EntryCodec(codec).residual_tokens):
        return kv.nbytes / sum(encode(codec, frame, "bfloat16").nbytes for frame in frames)
    num_bytes = sum(encode(codec, block, "bfloat16").nbytes for block in blocks_of(kv, window))
    return kv.nbytes / (num_bytes + kv[:, :, :, -window:].nbytes)


def compare_tokens(model: Model, kv: Bits, next_ids: Sequence[int], results: dict[Codec, CodecResult]) -> None:
    """Adds divergence and agreement on one passage."""
    reference = model.log_probs(kv, next_ids)
    for codec, result in results.items():
        log_probs = model.log_probs(lossy(codec, kv), next_ids)
        result.kl += (reference.exp() * (reference - log_probs)).sum(-1).tolist()
        result.agrees += (reference.argmax(-1) == log_probs.argmax(-1)).tolist()


def measure_speed(frames: Sequence[Bits], results: dict[Codec, CodecResult]) -> float:
    """Measures one round; returns the seconds that a copy of all frames takes."""
    for codec, result in results.items():
        began_s = time.thread_time()
        payloads = [encode(codec, frame, "bfloat16") for frame in frames]
        encoded_s = time.thread_time()
        for payload, frame in zip(payloads, frames, strict=True):
            decode(codec, payload, frame.shape, "bfloat16")
        result.in_s.append(encoded_s - began_s)
        result.out_s.append(time.thread_time() - encoded_s)
    began_s = time.thread_time()
    for frame in frames:
        frame.copy()
    return time.thread_time() - began_s


def cut(kv: Bits) -> list[Bits]:
    """Frames of a hand-over."""
    layers, _, heads, tokens, head_dim = kv.shape
    layout = KVLayout(layers, heads, head_dim, "bfloat16")
    return [
        np.ascontiguousarray(
            kv[part.layer_start : part.layer_end, :, :, part.token_start : part.token_start + part.num_tokens]
        )
        for part in plan_frames(layout, layout.whole(), 0, tokens)
    ]


def table(results: dict[Codec, CodecResult], kv: Bits, frames: Sequence[Bits], copy_s: float) -> str:
    """Table with one line per codec."""
    raw_bytes = sum(frame.nbytes for frame in frames)
    copy = raw_bytes / copy_s / 1e9
    lines = [f"{len(frames)} frames, {raw_bytes / 1e6:.1f} MB of bfloat16; a copy runs at {copy:.1f} GB/s"]
    lines.append(f"{'codec':6}{'ratio':>7}{'GB/s in':>9}{'GB/s out':>10}{'KL':>10}{'top-1 %':>9}")
    for codec, result in results.items():
        speeds = [raw_bytes / statistics.median(times_s) / 1e9 for times_s in (result.in_s, result.out_s)]
        shown = ["view", "view"] if codec is Codec.RAW else [f"{speed:.2f}" for speed in speeds]
        kl, agrees = statistics.mean(result.kl), 100 * statistics.mean(result.agrees)
        ratio = ratio_of(codec, kv, frames)
        lines.append(f"{codec.name.lower():6}{ratio:6.2f}x{shown[0]:>9}{shown[1]:>10}{kl:10.1e}{agrees:9.1f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prefixes", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--next", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args(arguments)
    checkpoint = prepare_checkpoint(options.model, as_numbers=True)
    model, results = Model(checkpoint), {codec: CodecResult() for codec in Codec}
    for text in texts(Tokenizer(checkpoint), options.prefixes, options.tokens + options.next):
        kv = model.kv(text[: options.tokens])
        compare_tokens(model, kv, text[options.tokens :], results)
    frames = cut(kv)
    measure_speed(frames, {codec: CodecResult() for codec in Codec})  # does not count
    copies_s = [measure_speed(frames, results) for _ in range(options.repeat)]
    print(f"{checkpoint.name}: {options.prefixes} passages of {options.tokens} tokens, {options.next} read on top")
    print(table(results, kv, frames, statistics.median(copies_s)))


if __name__ == "__main__":
    main()
