"""Workers whose devices have the whole model each and share the tokens of long prompts (ring attention)."""

from __future__ import annotations

from dataclasses import replace

from halfmoon.errors import InvalidRequest
from halfmoon.sim.latency_sources.hardware import device
from halfmoon.sim.latency_sources.latency_model import LatencyModel, LatencySource, Ring
from halfmoon.sim.latency_sources.roofline import Roofline

_SUM_BYTES = 4.0  # the sums of a running softmax are in float32
_LONGEST = 1 << 20  # tokens of a prompt beyond which nobody asks whether it is long


def parallel_model(source: LatencySource, gpu: str | None, tensor: int, pipeline: int, sequence: int) -> LatencyModel:
    """The latency of one worker. Raises InvalidRequest as `LatencySource.model` does.

    More than one sequence rank needs a roofline, which knows the model's rows and the devices' links.
    """
    if sequence == 1:
        return source.model(gpu, tensor, pipeline)
    if tensor * pipeline > 1:
        raise InvalidRequest(
            f"sequence ranks have the whole model each: SP{sequence} does not go with TP{tensor} x PP{pipeline}",
            param="sequence_parallel",
        )
    if not isinstance(source, Roofline):
        raise InvalidRequest(
            f"how {sequence} sequence ranks exchange keys was not measured: latencies need to be a roofline's",
            param="sequence_parallel",
        )
    one = source.model(gpu, 1, 1)
    return replace(
        one,
        ring=_ring(source, gpu or source.default_gpu, sequence),
        kv_tokens=sequence * one.kv_tokens,
        num_devices=sequence,
        source=f"{one.source}, SP{sequence}",
    )


def _ring(roofline: Roofline, gpu: str | None, num_ranks: int) -> Ring:
    assert gpu is not None, "the source's own model had a device"
    shape, efficiency = roofline.shape, roofline.efficiency
    link = device(gpu).exchange_bytes_per_s(num_ranks) * efficiency.link
    numbers = shape.num_heads * shape.head_dim * shape.num_layers * (1 if shape.latent is None else 2)
    query_bytes = numbers * ((num_ranks - 1) * 2.0 + num_ranks * _SUM_BYTES) / num_ranks
    return Ring(
        num_ranks,
        key_s=shape.kv_bytes_per_token * (num_ranks - 1) / num_ranks / link,
        query_s=query_bytes / link,
        round_s=shape.num_layers * num_ranks * efficiency.all_reduce_s,
    )


def long_prompt_tokens(model: LatencyModel) -> int | None:
    """The most tokens of a prompt that one rank computes no later than all of them; None where the ring never pays."""
    if model.ring is None:
        return None
    alone = replace(model, ring=None)
    if model.prefill_s(_LONGEST) >= alone.prefill_s(_LONGEST):
        return None
    short, long = 1, _LONGEST
    while long - short > 1:
        middle = (short + long) // 2
        if model.prefill_s(middle) < alone.prefill_s(middle):
            long = middle
        else:
            short = middle
    return short
