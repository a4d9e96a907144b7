"""What is on the host chosen by measured rates: the tokens of an engine with room, whatever was chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.config import EngineConfig, HostChoiceConfig, OffloadConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.kv_memory.kv_budget import device_weight_bytes, movable_bytes
from halfmoon.engine.models.forward_batch import ForwardBatch
from halfmoon.engine.models.llama import LlamaModel
from halfmoon.engine.request import EngineRequest
from halfmoon.errors import Incompatible
from tests.engine.engine_runs import MakeEngine, generate, request

CONTEXT_TOKENS = 64
ON_HOST = OffloadConfig(1 << 20, "throughput")


def some() -> list[EngineRequest]:
    return [request(f"r{length}", length, max_tokens=6) for length in (7, 19, 33)]


def choosing(
    make_engine: MakeEngine,
    model: str,
    device_bytes: int,
    offload: OffloadConfig | None = ON_HOST,
    objective: Literal["latency", "throughput"] = "throughput",
    **options: Any,
) -> Engine:
    choice = HostChoiceConfig(weights=True, kv=True, objective=objective, device_bytes=device_bytes)
    given = {"num_blocks": None, "max_context_tokens": CONTEXT_TOKENS, "host_choice": choice, "offload": offload}
    return make_engine(model, **{**given, **options})


def weights_of(make_engine: MakeEngine, model: str, share: float = 0.0) -> int:
    config = make_engine(model).checkpoint.model_config
    return device_weight_bytes(config, torch.float32, share)


@pytest.mark.parametrize("model", ["llama", "opt", "mixtral", "deepseek-v2"])
def test_an_engine_with_room_keeps_all_on_the_device(
    make_engine: MakeEngine, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate(make_engine(model), *some())
    caplog.set_level(logging.INFO, "halfmoon.engine.offload.host_choice")
    engine = choosing(make_engine, model, weights_of(make_engine, model) + (4 << 20))
    assert (engine.config.host_weights, engine.config.offload, engine.config.host_choice) == (0.0, None, None)
    assert generate(engine, *some()) == expected
    events = {record.getMessage(): record for record in caplog.records}
    assert vars(events["offload.host_chosen"])["reason"].startswith("the device holds all weights and the KV of")
    assert vars(events["offload.measured"])["layer_load_s"] > 0


def test_layers_in_the_middle_are_measured_on_hidden_states_of_their_dtype(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, dtypes = LlamaModel.forward, set[tuple[torch.dtype, torch.dtype]]()

    def noting(model: LlamaModel, batch: ForwardBatch, kv: Tensor, hidden: Tensor | None = None) -> Tensor:
        if hidden is not None:
            dtypes.add((hidden.dtype, model.hidden_dtype))
        return forward(model, batch, kv, hidden)

    monkeypatch.setattr("halfmoon.engine.offload.host_choice._PROBE_LAYERS", 1)
    monkeypatch.setattr(LlamaModel, "forward", noting)
    engine = choosing(make_engine, "llama", weights_of(make_engine, "llama") + (4 << 20), dtype="bfloat16")
    assert dtypes == {(torch.float32, torch.float32)}
    engine.close()


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("model", ["llama", "opt"])
def test_weights_or_kv_that_the_device_has_no_room_for_are_on_the_host(
    make_engine: MakeEngine, model: str, objective: Literal["latency", "throughput"]
) -> None:
    """Room for the buffers and one sequence: which of both is moved the rates decide, and the tokens stay."""
    expected = generate(make_engine(model), *some())
    layout = make_engine(model).layout
    room = weights_of(make_engine, model) + layout.num_blocks(CONTEXT_TOKENS) * layout.block_bytes * 3 // 4
    engine = choosing(make_engine, model, room, objective=objective, max_running=3)
    assert engine.config.offload is not None or engine.config.host_weights > 0
    assert generate(engine, *some()) == expected
    engine.close()


def deep(make_engine: MakeEngine) -> tuple[int, int]:
    """Weights on the device with none and with all layers on the host."""
    return weights_of(make_engine, "opt"), weights_of(make_engine, "opt", 1.0)


def test_without_kv_on_the_host_the_weights_make_room(make_engine: MakeEngine) -> None:
    """Three layers: with all on the host, the two buffers leave the room of one."""
    expected = generate(make_engine("opt"), *some())
    full, least = deep(make_engine)
    layout = make_engine("opt").layout
    padding = 16 << 10  # of packed weights
    room = least + padding + layout.num_blocks(CONTEXT_TOKENS) * layout.block_bytes
    assert room < full + layout.num_blocks(CONTEXT_TOKENS) * layout.block_bytes
    engine = choosing(make_engine, "opt", room, offload=None, max_running=3)
    assert engine.config.host_weights == 1.0
    assert generate(engine, *some()) == expected
    engine.close()


def test_rounded_weights_count_as_they_are_packed(tiny_checkpoint: Callable[[str], Checkpoint]) -> None:
    """Memory for all weights in float32 but a little holds those in eight bits."""
    plain = tiny_checkpoint("opt")
    rounded = prepare_checkpoint(str(plain.path), quantization="int8")
    engines = []
    for checkpoint, share in ((plain, 1.0), (rounded, 0.0)):
        full = device_weight_bytes(plain.model_config, torch.float32, 0.0)
        choice = HostChoiceConfig(weights=True, kv=False, objective="latency", device_bytes=full + (16 << 10))
        config = EngineConfig(
            dtype="float32", block_tokens=8, max_running=8, max_context_tokens=CONTEXT_TOKENS, host_choice=choice
        )
        engines.append(Engine(checkpoint, config))
        assert engines[-1].config.host_weights == share
    known = Engine(rounded, EngineConfig(dtype="float32", block_tokens=8, num_blocks=64, max_running=8))
    assert generate(engines[1], *some()) == generate(known, *some())
    engines[0].close()


def test_workers_of_one_host_divide_its_free_memory(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all layers fit there once."""
    plain, (_, least) = make_engine("opt"), deep(make_engine)
    layout, layers = plain.layout, movable_bytes(plain.checkpoint.model_config, torch.float32)
    monkeypatch.setattr("halfmoon.host_limits.free_memory_bytes", lambda: 3 * sum(layers) // 2)
    room = least + (16 << 10) + layout.num_blocks(CONTEXT_TOKENS) * layout.block_bytes
    engine = choosing(make_engine, "opt", room, offload=None)
    assert engine.config.host_weights == 1.0
    engine.close()
    with pytest.raises(Incompatible, match="on the host"):
        choosing(make_engine, "opt", room, offload=None, host_workers=2)


def test_memory_that_holds_no_sequence_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(Incompatible, match="one sequence of 64 tokens"):
        choosing(make_engine, "llama", 1 << 10)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kv_memory_bytes": 1 << 20}, "give device_memory instead of kv_memory"),
        ({"tensor_parallel": 2}, "with several ranks"),
        ({"host_choice": HostChoiceConfig(weights=True, kv=False)}, "on a CPU, device_memory has to say"),
        ({"host_choice": HostChoiceConfig(weights=False, kv=True)}, "offload_kv: auto"),
    ],
)
def test_what_cannot_be_chosen_is_refused(options: dict[str, Any], match: str) -> None:
    plain = {"host_choice": HostChoiceConfig(weights=True, kv=False, device_bytes=1 << 20)}
    with pytest.raises(Incompatible, match=match):
        EngineConfig(**{**plain, **options})
