"""Secrets in URLs."""

from __future__ import annotations

import pytest

from halfmoon.rpc.addresses.masked_url import masked_url
from halfmoon.rpc.service import _as_logged
from services.decode.settings import DecodeSettings


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:////state/ledger.db", "sqlite:////state/ledger.db"),
        ("postgresql://me:hush@host:5432/db", "postgresql://***@host:5432/db"),
        ("postgresql://host/db?user=me&password=hush", "postgresql://host/db?user=***&password=***"),
        ("s3://bucket?hush", "s3://bucket?***"),
        ("s3://bucket?secret_access_key=hu@sh", "s3://***"),
        ("redis://:hu@sh/@host/0", "redis://***@host/0"),
        ("postgresql://me:hu?sh@host/db?sslmode=require", "postgresql://***"),
        ("hush", "***"),
    ],
)
def test_a_shown_url_has_no_secrets(url: str, shown: str) -> None:
    assert masked_url(url) == shown


def test_the_logged_settings_of_every_service_hide_the_receiver_of_traces() -> None:
    settings = DecodeSettings(gateway="x:1", otlp_endpoint="http://me:hush@host:4317")
    assert _as_logged(settings)["otlp_endpoint"] == "http://***@host:4317"
