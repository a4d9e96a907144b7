"""A policy says which blocks are freed, is read from its text, and keeps its KV apart from others' by the salt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from halfmoon.kv.keys import adapter_of, adapter_salt
from halfmoon.kv.kv_policy import (
    H2O,
    SNAPKV,
    KVPolicy,
    kv_policy_of,
    most_blocks,
    most_tokens,
    parse_kv_policy,
    policy_salt,
)

POLICIES = st.just(KVPolicy(0, 9)) | st.builds(
    KVPolicy, st.integers(1, 300), st.integers(1, 2000), st.sampled_from((None, SNAPKV, H2O))
)


@given(POLICIES, st.integers(0, 5000), st.sampled_from((8, 16, 64)))
def test_sinks_and_window_are_seen_and_what_is_freed_stays_so(policy: KVPolicy, position: int, size: int) -> None:
    unseen = policy.unseen(position, size)
    assert unseen.start * size >= policy.num_early
    if unseen:
        assert policy.num_window <= position + 1 - unseen.stop * size <= policy.num_window + 2 * size
    later = policy.unseen(position + 1, size)
    assert (later.start, later.stop >= unseen.stop) == (unseen.start, True)


@given(POLICIES, st.integers(1, 300), st.integers(1, 5000), st.sampled_from((8, 16, 64)))
def test_no_prompt_that_fits_is_longer_than_a_request_may_be(
    policy: KVPolicy, num_blocks: int, num_prompt: int, size: int
) -> None:
    most = most_tokens(policy, num_blocks, size)
    if most_blocks(policy, num_prompt, num_prompt + 1, size) <= num_blocks:
        assert num_prompt < most
        assert most_blocks(policy, num_prompt, most, size) <= num_blocks, "an answer may go on to the end"
    assert most_tokens(None, num_blocks, size) == num_blocks * size


@given(POLICIES, st.sampled_from(("", "ab" * 16)), st.binary(max_size=40).filter(lambda salt: salt[:1] < b"\xfb"))
def test_the_salt_names_the_policy(policy: KVPolicy, adapter: str, tenant_salt: bytes) -> None:
    salt = adapter_salt(adapter, policy_salt(policy, tenant_salt))
    assert (kv_policy_of(salt), adapter_of(salt)) == (policy, adapter)
    assert kv_policy_of(adapter_salt(adapter, policy_salt(None, tenant_salt))) is None
    assert parse_kv_policy(str(policy)) == policy


def test_a_request_may_keep_its_whole_kv() -> None:
    assert parse_kv_policy("whole") is None


def test_no_text_of_a_client_is_a_policy() -> None:
    for text in ("ý", "\xfd", "sinks:4+64", "\U0010ffff"):
        assert kv_policy_of(text.encode()) is None


@pytest.mark.parametrize(
    "text", ["", "sinks", "sinks:4", "sinks:4+0", "sinks:-1+4", "sinks:4+1048577", "sinks:4+64 ", "snapkv:0+9"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse_kv_policy(text)
    assert refusal.value.param == "kv_policy"


def test_the_salt_of_sinks_is_that_of_earlier_versions() -> None:
    """Workers of both decode one prompt during an upgrade, and stored blocks are still found after it."""
    assert policy_salt(KVPolicy(4, 1024), b"t") == b"\xfd" + bytes((4, 0, 0, 0, 0, 4, 0, 0)) + b"t"


@pytest.mark.parametrize("salt", [mark + bytes(rest) for mark in (b"\xfd", b"\xfc") for rest in (0, 7, 8)])
def test_a_damaged_salt_is_refused(salt: bytes) -> None:
    with pytest.raises(InvalidRequest):
        kv_policy_of(salt)
