"""The arithmetic of memory, by hand and as laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.engine.model_config import parse_model_config
from halfmoon.errors import InvalidRequest
from services.planner.capacity import CapacityQuestion, capacity
from services.planner.weights import num_parameters

GIB = 1 << 30
LLAMA_8B = parse_model_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
)
H100 = CapacityQuestion("bfloat16", 80 * GIB, 1, 8192)


def test_llama_3_8b_on_one_80_gib_device() -> None:
    answer = capacity(LLAMA_8B, H100)
    assert answer.weight_bytes == 8_030_261_248 * 2
    assert answer.kv_block_bytes == 64 * 131_072  # 128 KiB a token
    assert answer.num_blocks == (int(80 * GIB * 0.9) - answer.weight_bytes) // answer.kv_block_bytes
    assert answer.num_sequences == answer.num_blocks // 128
    assert answer.fits
    for figure in (
        "72.00 GiB of 80.00 GiB",
        "14.96 GiB of weights",
        "8.00 MiB",
        f"Fits {answer.num_sequences} at once",
    ):
        assert figure in answer.explanation


def test_four_devices_hold_a_quarter_of_the_kv() -> None:
    answer = capacity(LLAMA_8B, replace(H100, num_devices=4))
    assert answer.kv_block_bytes == 64 * 131_072 // 4
    assert answer.weight_bytes == num_parameters(LLAMA_8B, 4) * 2
    assert "each of 4 devices" in answer.explanation


def test_weights_that_do_not_fit_leave_no_blocks() -> None:
    answer = capacity(LLAMA_8B, replace(H100, memory_bytes=8 * GIB))
    assert (answer.num_blocks, answer.num_sequences, answer.fits) == (0, 0, False)
    assert "7.76 GiB too much before any KV" in answer.explanation


def test_room_for_blocks_but_not_for_a_sequence_does_not_fit() -> None:
    answer = capacity(LLAMA_8B, replace(H100, memory_bytes=17 * GIB))
    assert answer.num_blocks > 0
    assert not answer.fits
    assert answer.explanation.startswith("Does not fit.")
    assert "takes 128" in answer.explanation


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("dtype", "int8"),
        ("dtype", ""),
        ("memory_bytes", 0),
        ("num_devices", 0),
        ("num_devices", 3),
        ("context_tokens", 0),
        ("context_tokens", 8193),
        ("block_tokens", 0),
        ("reserved_share", 1.0),
        ("reserved_share", -0.1),
        ("reserved_share", float("nan")),
    ],
)
def test_senseless_questions_name_the_parameter(param: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        capacity(LLAMA_8B, replace(H100, **{param: value}))
    assert caught.value.param == param


@given(
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.integers(1, 200 * GIB),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
    st.integers(1, 8192),
    st.integers(1, 256),
    st.floats(0, 0.99),
)
def test_what_is_promised_is_there(
    dtype: str, memory: int, devices: int, context: int, block: int, reserved: float
) -> None:
    question = CapacityQuestion(dtype, memory, devices, context, block, reserved)
    answer = capacity(LLAMA_8B, question)
    taken = answer.weight_bytes + answer.num_blocks * answer.kv_block_bytes
    usable = int(memory * (1 - reserved))
    assert answer.num_blocks == 0 or taken <= usable < taken + answer.kv_block_bytes
    assert answer.num_sequences * context <= answer.num_blocks * block
    assert answer.fits == (answer.num_sequences > 0)
    more = capacity(LLAMA_8B, replace(question, memory_bytes=memory + GIB))
    assert more.num_sequences >= answer.num_sequences
