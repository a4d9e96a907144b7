"""API keys: hard to guess, kept by digest, read from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.credentials.api_keys import (
    bearer,
    declared_key,
    key_digest,
    key_id,
    keys_of_file,
    new_api_key,
    rule_value,
    secret_of_file,
    sent_value,
)


def test_keys_are_hard_to_guess_and_differ() -> None:
    keys = {new_api_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("hm-") and len(key) == 3 + 43 for key in keys)  # 43 characters hold 256 bits


def test_a_key_may_be_written_as_its_digest() -> None:
    digest = key_digest("secret")
    assert declared_key("secret", "a")[1:] == declared_key(f"sha256:{digest}", "a")[1:] == (digest, "a")
    assert declared_key("secret").tenant == f"key-{key_id(digest)}"


def test_rules_name_a_key_without_holding_it() -> None:
    value = rule_value("secret")
    assert value == rule_value(value) == rule_value(f"sha256:{key_digest('secret')}") == sent_value("secret")
    assert "secret" not in value
    assert sent_value(value) != value  # who read a rule cannot send what it matches


@pytest.mark.parametrize(
    ("header", "key"), [("Bearer k", "k"), ("bearer  k ", "k"), ("Basic k", ""), ("k", ""), ("", ""), ("Bearer", "")]
)
def test_bearer(header: str, key: str) -> None:
    assert bearer(header) == key


def test_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# keys\nacme one\nacme two # the next one\n\nalone\n")
    keys = keys_of_file(file)
    assert [(key.tenant, key.digest) for key in keys] == [
        ("acme", key_digest("one")),
        ("acme", key_digest("two")),
        (f"key-{key_id(key_digest('alone'))}", key_digest("alone")),
    ]
    file.write_text("a b c\n")
    with pytest.raises(InvalidRequest, match=r"keys:1 must hold a tenant's name and a key"):
        keys_of_file(file)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        keys_of_file(tmp_path / "absent")


def test_a_file_with_a_secret(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("word\n")
    assert secret_of_file(file, "operator_token_file") == "word"
    file.write_text("\n")
    with pytest.raises(InvalidRequest, match="is empty"):
        secret_of_file(file, "operator_token_file")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        secret_of_file(tmp_path, "operator_token_file")
