"""AIConfigurator's times in our form, by an engine whose laws are known: the package itself is not installed here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.sim.latency_sources.latency_model import LatencyModel
from halfmoon.sim.latency_sources.latency_source import latency_source


class Compiled:
    """Prompts take 4 ms + 0.01 a token + 2e-6 a pair, steps 5 ms + 0.02 a sequence + 1e-5 a token of context."""

    def __init__(self, config: dict[str, Any], system: str, backend: str, tp_size: int, pp_size: int) -> None:
        self.config, self.asked = config, (system, backend, tp_size, pp_size)

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        new = isl - prefix
        return 4 + bs * (0.01 * new + 2e-6 * new * (prefix + new / 2))

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        return 5 + 0.02 * bs + 1e-5 * bs * isl


class Sdk:
    """Stands where `aiconfigurator_core.sdk` is imported from."""

    def __init__(self) -> None:
        self.engines: list[Compiled] = []
        self.EngineHandle = SimpleNamespace(compile=self._compile)

    def estimate_kv_cache(self, model_path: str, system: str, backend: str, **of: Any) -> dict[str, Any]:
        """A step's tokens and a share of the memory decide, as there; TensorRT-LLM takes it of what is free."""
        if of["tp_size"] < 2 and json.loads(Path(model_path, "config.json").read_text())["num_hidden_layers"] == 80:
            raise ValueError("no KV budget")
        assert of["memory_fraction_kind"] == ("of_free" if backend == "trtllm" else "of_total")
        return {"total_kv_size_bytes": 8e9}

    def _compile(
        self, model_path: str, system: str, backend: str, *, backend_version: str, tp_size: int, pp_size: int
    ) -> Compiled:
        if system == "l40s":
            raise ValueError("no gemm table")
        config = json.loads(Path(model_path, "config.json").read_text())
        self.engines.append(Compiled(config, system, backend, tp_size, pp_size))
        return self.engines[-1]


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> Sdk:
    found = Sdk()
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk", found)
    return found


def model(text: str, gpu: str | None = None, tp: int = 1, pp: int = 1) -> LatencyModel:
    return latency_source(text).model(gpu, tp, pp)


def test_its_times_are_those_of_the_model(sdk: Sdk) -> None:
    found = model("aiconfigurator:llama-3.1-8b@h200")
    assert found.error == pytest.approx((0, 0), abs=1e-9)
    assert found.prefill_s(700, 300) == pytest.approx(0.004 + 0.007 + 2e-9 * 700 * 650)
    assert found.stage_s(0, 0, 5, 5000) == pytest.approx(0.005 + 1e-4 + 5e-5)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_each_of_more_devices_holds_less_of_a_token(sdk: Sdk, tp: int, pp: int) -> None:
    kv_bytes = 2 * 32 * 8 * 128 * 2  # of a token
    found = model("aiconfigurator:llama-3.1-8b@h200", tp=tp, pp=pp)
    assert found.kv_tokens == 8_000_000_000 * tp * pp // kv_bytes


def test_a_stage_has_its_share_of_a_pass(sdk: Sdk) -> None:
    found = model("aiconfigurator:llama-3.1-8b@h200", pp=2)
    assert found.stage_s(0, 0, 4, 4000) == pytest.approx((0.005 + 8e-5 + 4e-5) / 2)
    assert found.prefill_s(1000) == pytest.approx(model("aiconfigurator:llama-3.1-8b@h200").prefill_s(1000))
    assert found.num_devices == 2


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("aiconfigurator", "trtllm"), ("aiconfigurator-vllm", "vllm"), ("aiconfigurator-sglang", "sglang")],
)
def test_it_is_asked_for_the_models_shape_the_device_and_the_engine(sdk: Sdk, kind: str, backend: str) -> None:
    model(f"{kind}:qwen3-32b", "a100-80g", 4)
    (engine,) = sdk.engines
    assert engine.asked == ("a100_sxm", backend, 4, 1)
    shape = {name: engine.config[name] for name in ("num_hidden_layers", "hidden_size", "head_dim", "vocab_size")}
    assert shape == {"num_hidden_layers": 64, "hidden_size": 5120, "head_dim": 128, "vocab_size": 151936}


@pytest.mark.parametrize(
    ("text", "gpu", "tp", "says"),
    [
        ("aiconfigurator:llama-3.1-8b", None, 1, "has times of a100-80g, h100, h200, b200, l40s, not of None"),
        ("aiconfigurator:llama-3.1-8b", "cpu", 1, "not of cpu"),
        ("aiconfigurator:llama-3.1-8b", "h100", 3, "does not divide the model's 32"),
        ("aiconfigurator:llama-3.1-70b", "h100", 1, "no answer for llama-3.1-70b .*: no KV budget"),
        ("aiconfigurator:opt-13b", "h100", 1, "no models like opt-13b"),
        ("aiconfigurator:llama-3.1-8b", "l40s", 1, "no answer for llama-3.1-8b on l40s .*: no gemm table"),
    ],
)
def test_what_it_has_no_times_of_is_told(sdk: Sdk, text: str, gpu: str | None, tp: int, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        model(text, gpu, tp)


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'halfmoon\[aiconfigurator\]'"):
        model("aiconfigurator:llama-3.1-8b@h100")


def test_an_engine_that_it_does_not_know_is_no_source() -> None:
    with pytest.raises(InvalidRequest, match="aiconfigurator-BACKEND"):
        latency_source("aiconfigurator-lmdeploy:llama-3.1-8b@h100")
