"""Our settings become vLLM's options; what we decide is refused in --engine-args."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmoon.engine.checkpoint.adapters import Adapter
from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.vllm_engine.frontend.engine_arguments import VllmOptions, further_arguments
from halfmoon.vllm_engine.frontend.versions import check_release


def test_only_what_is_set_is_passed_on() -> None:
    assert VllmOptions("/models/m", dtype="float32", max_context_tokens=1024).arguments() == {
        "model": "/models/m", "skip_tokenizer_init": True, "dtype": "float32", "block_size": 64, "max_model_len": 1024,
        "max_num_seqs": 64, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "scheduling_policy": "priority",
    }  # fmt: skip


def test_adapters_have_room_for_their_rank() -> None:
    adapters = tuple(Adapter(name, Path(name), "", rank) for name, rank in (("a", 4), ("b", 9)))
    more = VllmOptions("/models/m", adapters=adapters, engine_args="--max-loras 1").arguments()
    assert {name: value for name, value in more.items() if "lora" in name} == {
        "enable_lora": True, "max_loras": 1, "max_lora_rank": 16,
    }  # fmt: skip


def test_further_options_are_read_as_on_a_command_line() -> None:
    text = "--quantization awq --enforce-eager --seed=3 --no-enable-prefix-caching --hf-overrides '{\"a\": [1]}'"
    assert further_arguments(text) == {
        "quantization": "awq", "enforce_eager": True, "seed": 3, "enable_prefix_caching": False,
        "hf_overrides": {"a": [1]},
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "--max-model-len 9",
        "--enable-lora",
        "--kv-transfer-config {}",
        "--model x",
        "--kv-cache-dtype fp8",
        "--spec-method ngram",
        "--decode-context-parallel-size 2",
        "--kv-offloading-size 1",
    ],
)
def test_options_of_ours_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=text.split()[0]):
        further_arguments(text)


@pytest.mark.parametrize("text", ["--quantization={", "--quantization !!bool", "--override-x '[1, 2'"])
def test_a_value_that_is_not_yaml_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{text[:10]}.*cannot be read as YAML"):
        further_arguments(text)


def test_a_word_without_an_option_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="awq"):
        further_arguments("awq")


@pytest.mark.parametrize("release", ["0.32.0", "0.32.3+cpu", "0.32.0rc1"])
def test_known_releases_pass(release: str) -> None:
    check_release(release)


@pytest.mark.parametrize("release", ["0.31.2", "0.33.0", "1.0", "dev"])
def test_other_releases_are_refused_with_the_range(release: str) -> None:
    with pytest.raises(Incompatible, match=r"0\.32 or later, below 0\.33"):
        check_release(release)
