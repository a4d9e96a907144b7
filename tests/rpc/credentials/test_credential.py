"""The cluster secret and the credentials derived of it."""

from __future__ import annotations

import base64
import itertools
import json

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.credentials.credential import checked_secret, credential_from, new_secret
from halfmoon.rpc.credentials.roles import CLUSTER_ROLES, ClusterRole

SECRET = "a secret of the tests must be long enough".replace(" ", "-")


@pytest.mark.parametrize("role", CLUSTER_ROLES)
def test_secret_and_credential_give_a_process_the_same(role: ClusterRole) -> None:
    derived = credential_from(SECRET, role)
    assert credential_from(f" {derived.text()}\n", role) == derived
    tokens = [credential_from(SECRET, other).tokens[role] for other in CLUSTER_ROLES]
    assert [derived.role_of(token) for token in tokens] == list(CLUSTER_ROLES)


def test_what_a_service_is_shown_is_worthless_elsewhere() -> None:
    """A store sees the tokens of operators and workers, and can use them neither at the planner nor at a gateway."""
    seen = [credential_from(SECRET, caller).tokens["store"] for caller in CLUSTER_ROLES]
    others = [credential_from(SECRET, role) for role in CLUSTER_ROLES if role != "store"]
    assert {other.role_of(token) for other in others for token in seen} == {None}


def test_every_pair_of_roles_and_every_secret_has_a_token_of_its_own() -> None:
    credentials = [credential_from(secret, role) for role in CLUSTER_ROLES for secret in (SECRET, new_secret())]
    tokens = [token for credential in credentials for token in credential.tokens.values()]
    assert len({SECRET, *tokens}) == len(tokens) + 1
    assert len({new_secret() for _ in range(100)}) == 100


def test_a_credential_holds_neither_the_secret_nor_another_token() -> None:
    text = credential_from(SECRET, "worker").text()
    body = base64.urlsafe_b64decode(text.partition(":")[2]).decode()
    others = [credential_from(SECRET, role).tokens.values() for role in CLUSTER_ROLES if role != "worker"]
    assert not [secret for secret in (SECRET, *itertools.chain(*others)) if secret in body]


def test_only_stores_have_the_key_of_blocks() -> None:
    keys = {role: credential_from(SECRET, role).block_key for role in CLUSTER_ROLES}
    assert len(keys["store"]) == 32
    assert {role for role, key in keys.items() if key} == {"store"}


@pytest.mark.parametrize("given", ["", "x", "Bearer", "\udc80", "ü" * 40, SECRET, "0" * 64])
def test_strangers_have_no_role(given: str) -> None:
    assert credential_from(SECRET, "store").role_of(given) is None


def test_nothing_secret_is_shown() -> None:
    credential = credential_from(SECRET, "worker")
    assert repr(credential) == "Credential(role='worker')"


def _credential(**changes: object) -> str:
    body = json.loads(base64.urlsafe_b64decode(credential_from(SECRET, "worker").text().partition(":")[2]))
    return "halfmoon-credential:" + base64.urlsafe_b64encode(json.dumps({**body, **changes}).encode()).decode()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "at least 32 bytes"),
        ("short", "at least 32 bytes"),
        ("a b " * 20, "one word"),
        ("x" * 40 + "\n" + "y", "one word"),
        ("halfmoon-credential:", "damaged"),
        ("halfmoon-credential:!!!", "damaged"),
        (credential_from(SECRET, "worker").text()[:-9], "damaged"),
        (_credential(tokens={}), "damaged"),
        (_credential(role="emperor"), "damaged"),
        (_credential(digests=[]), "damaged"),
        (_credential(blocks=7), "damaged"),
        (credential_from(SECRET, "gateway").text(), "that of a gateway, and this is a worker"),
    ],
)
def test_anything_else_is_refused_without_repeating_it(text: str, error: str) -> None:
    with pytest.raises(InvalidRequest, match=error) as caught:
        credential_from(text, "worker")
    assert text.strip() not in caught.value.message or not text.strip()


def test_a_credential_is_no_secret() -> None:
    with pytest.raises(InvalidRequest, match="the cluster secret itself"):
        checked_secret(credential_from(SECRET, "operator").text())
