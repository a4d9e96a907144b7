"""Equal keys mean equal prefixes, on every machine."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.kv.keys import (
    KEY_BYTES,
    adapter_of,
    adapter_salt,
    block_keys,
    child_key,
    iter_block_keys,
    root_key,
)
from halfmoon.kv.kv_layout import KVLayout

LAYOUT = KVLayout(30, 3, 64, "bfloat16", 4)
ROOT = root_key("smollm2-135m", LAYOUT)

# Few tokens and short prompts: hypothesis finds shared prefixes often.
prompts = st.lists(st.integers(0, 2) | st.integers(0, 2**32 - 1), max_size=24)
roots = st.tuples(
    st.text(max_size=3), st.sampled_from([LAYOUT, KVLayout(30, 3, 64, "bfloat16", 8)]), st.binary(max_size=3)
)


@given(prompts, prompts, st.integers(1, 5))
def test_keys_are_equal_exactly_where_prefixes_are(left: list[int], right: list[int], block_tokens: int) -> None:
    left_keys, right_keys = block_keys(ROOT, left, block_tokens), block_keys(ROOT, right, block_tokens)
    for index, (left_key, right_key) in enumerate(zip(left_keys, right_keys, strict=False)):
        end = (index + 1) * block_tokens
        assert (left_key == right_key) == (left[:end] == right[:end])


@given(prompts, prompts, st.integers(1, 5))
def test_a_longer_prompt_keeps_its_prefix_keys(prompt: list[int], more: list[int], block_tokens: int) -> None:
    keys = block_keys(ROOT, prompt, block_tokens)
    assert block_keys(ROOT, prompt + more, block_tokens)[: len(keys)] == keys


@given(prompts, st.integers(1, 5))
def test_only_full_blocks_have_keys_and_all_differ(prompt: list[int], block_tokens: int) -> None:
    keys = block_keys(ROOT, prompt, block_tokens)
    assert len(set(keys)) == len(keys) == len(prompt) // block_tokens
    assert all(len(key) == KEY_BYTES for key in keys)


@given(prompts, st.integers(1, 5))
def test_the_chain_can_be_walked_one_child_at_a_time(prompt: list[int], block_tokens: int) -> None:
    parent = ROOT
    for index, key in enumerate(iter_block_keys(ROOT, prompt, block_tokens)):
        parent = child_key(parent, prompt[index * block_tokens : (index + 1) * block_tokens])
        assert parent == key


@given(roots, roots)
def test_roots_separate_model_layout_and_tenant(
    left: tuple[str, KVLayout, bytes], right: tuple[str, KVLayout, bytes]
) -> None:
    assert (root_key(*left) == root_key(*right)) == (left == right)


adapters = st.just("") | st.binary(min_size=16, max_size=16).map(bytes.hex)
salts = st.text(max_size=3).map(str.encode) | st.binary(max_size=3).map(lambda rest: b"\xff" + rest)  # as tenants have


@given(adapters, salts, adapters, salts)
def test_salts_separate_adapters_and_tenants(left: str, salt: bytes, right: str, other: bytes) -> None:
    assert (adapter_salt(left, salt) == adapter_salt(right, other)) == ((left, salt) == (right, other))
    assert adapter_of(adapter_salt(left, salt)) == left


def test_pinned_vector() -> None:
    """A change of these bytes orphans every block that a store holds."""
    assert ROOT.hex() == "6457df8e40d391ed6e48e54cd898b71a"
    assert [key.hex() for key in block_keys(ROOT, range(1, 10), 4)] == [
        "601305b0862b2a7dfde4ab55b8d11459",
        "00d11a48b6a17da2d1a54038b2f84414",
    ]


def test_a_key_is_what_the_docstring_says() -> None:
    tokens = b"".join(token.to_bytes(4, "little") for token in (1, 2, 3, 4))
    assert block_keys(ROOT, [1, 2, 3, 4], 4) == [hashlib.blake2b(ROOT + tokens, digest_size=16).digest()]
