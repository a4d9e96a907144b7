"""The engine over a real vLLM, in its own environment: `real_vllm` says what holds. `make test-vllm` runs it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV2Config, LlamaConfig, MambaConfig, MixtralConfig

from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from tests.vllm_engine.real_vllm import CHECKS, LATENT_CHECKS

PYTHON = os.environ.get("HALFMOON_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="HALFMOON_VLLM_PYTHON names no interpreter that has vLLM"),
]

ROOT = Path(__file__).resolve().parents[2]
_SHARED = {
    "vocab_size": 49152, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 32,
    "num_attention_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.2, "eos_token_id": 2,
    "bos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_LATENT = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}


_CORES = {2: {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}  # ranks want a NUMA node each, or names of cores


def llama() -> Any:
    return LlamaConfig(**_SHARED, num_key_value_heads=1)


def mixtral() -> Any:
    """Experts, which our own engine does not compute."""
    return MixtralConfig(**_SHARED, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)


def deepseek() -> Any:
    """Latent attention of the only size that vLLM computes on CPUs."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    return DeepseekV2Config(**_SHARED, **_LATENT, **experts, moe_intermediate_size=64)


def mamba() -> Any:
    """State-space layers, which have no KV."""
    return MambaConfig(vocab_size=49152, hidden_size=64, state_size=8, num_hidden_layers=2)


def saved(config: Any, path: Path) -> Path:
    torch.manual_seed(1)
    make: Any = AutoModelForCausalLM.from_config
    make(config, dtype=torch.float32).save_pretrained(path)
    for file in Path(prepare_checkpoint("demo").path).glob("tokenizer*"):
        shutil.copy(file, path)
    return path


def adapter(config: Any, path: Path, seed: int, rank: int) -> str:
    """An adapter with random weights for every projection."""
    path.mkdir()
    generator, width = torch.Generator().manual_seed(seed), config.num_attention_heads * config.head_dim
    kv_width, hidden, inner = config.num_key_value_heads * config.head_dim, config.hidden_size, config.intermediate_size
    sizes = {
        "self_attn.q_proj": (hidden, width), "self_attn.k_proj": (hidden, kv_width),
        "self_attn.v_proj": (hidden, kv_width), "self_attn.o_proj": (width, hidden),
        "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    values = {}
    for layer in range(config.num_hidden_layers):
        for name, (num_in, num_out) in sizes.items():
            whole = f"base_model.model.model.layers.{layer}.{name}"
            values[f"{whole}.lora_A.weight"] = 0.2 * torch.randn(rank, num_in, generator=generator)
            values[f"{whole}.lora_B.weight"] = 0.2 * torch.randn(num_out, rank, generator=generator)
    save_file(values, path / "adapter_model.safetensors")
    targets = [name.split(".")[1] for name in sizes]
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (path / "adapter_config.json").write_text(json.dumps(written))
    return f"{path.name}={path}"


@pytest.mark.parametrize(("config", "ranks"), [(llama, 1), (mixtral, 1), (mixtral, 2), (deepseek, 1)])
async def test_what_only_vllm_can_show(config: Any, ranks: int, tmp_path: Path) -> None:
    model, refused = saved(config(), tmp_path / "model"), saved(mamba(), tmp_path / "refused")
    lora = [adapter(config(), tmp_path / name, seed, 4) for seed, name in enumerate(("sql", "fr"))]
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if config is llama else {}  # as on a GPU
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, "-m", "tests.vllm_engine.real_vllm", str(ranks), str(model), str(refused)),
        *(lora if config is llama else ()),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **_CORES.get(ranks, {}), **one_process},
    )
    assert process.stdout is not None
    found: list[dict[str, str]] = []
    log: list[str] = []
    async for line in process.stdout:
        log.append(line.decode(errors="replace"))
        if line.startswith(b'{"'):
            found.append(json.loads(line))
        if found and found[-1].get("holds") == "everything":
            break
    names = [check.__name__ for check in (LATENT_CHECKS if config is deepseek else CHECKS)]
    assert [line["holds"] for line in found if "holds" in line] == [*names, "everything"], "".join(log[-40:])
    assert "state-space" in found[0]["refused"]
    assert config is deepseek or any("Recovered from KV load failure" in line for line in log)
    vllm = psutil.Process(process.pid).children(recursive=True)
    assert vllm
    os.kill(process.pid, signal.SIGKILL)
    _, alive = await asyncio.to_thread(psutil.wait_procs, vllm, 30)
    assert not alive, "vLLM outlives its worker"
    await process.wait()
