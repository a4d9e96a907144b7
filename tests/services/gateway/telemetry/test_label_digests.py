"""Labels of clients are in no log and no ledger in clear."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from services.gateway.telemetry.label_digests import LabelDigests, label_key
from tests.services.gateway.fakes import MODEL, running_fleet
from tests.services.gateway.test_access import ask
from tests.services.gateway.test_tenants import everything_in

LABELS = {
    "user": "jane@doe.example",
    "safety_identifier": "jane-doe-7",
    "metadata": {"patient-of": "Dr. Jekyll"},
}


def test_equal_labels_have_equal_digests_under_one_key() -> None:
    first, second = LabelDigests(b"1" * 32), LabelDigests(b"2" * 32)
    assert first.of(LABELS) == first.of(LABELS) != second.of(LABELS)
    assert set(first.of(LABELS)) == set(LABELS)
    assert len({*first.of(LABELS).values(), *second.of(LABELS).values()}) == 6


def test_gateways_of_one_host_share_the_key(tmp_path: Path) -> None:
    key = label_key(tmp_path / "state")
    assert key == label_key(tmp_path / "state") != label_key(tmp_path / "other")
    (file,) = (tmp_path / "state").iterdir()
    assert (len(key), file.stat().st_mode & 0o777) == (32, 0o600)


def test_a_directory_that_cannot_be_made_gives_a_key_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert len(label_key(tmp_path / "file")) == 32


async def test_labels_are_logged_without_their_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 1, **LABELS}
    with caplog.at_level(logging.INFO):
        async with running_fleet(tmp_path) as fleet:
            await fleet.pair()
            assert (await ask(fleet, "POST", "/v1/completions", json=body))[0] == 200
            digests = LabelDigests(label_key(tmp_path)).of(LABELS)
    (record,) = [record for record in caplog.records if record.message == "request.ended"]
    assert vars(record)["labels"] == digests
    written = everything_in(tmp_path) + str([vars(one) for one in caplog.records])
    for secret in ("jane", "patient", "Jekyll"):
        assert secret not in written
