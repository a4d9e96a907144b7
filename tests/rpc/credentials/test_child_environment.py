"""Which secrets of its parent a child process inherits."""

from __future__ import annotations

import pytest

from halfmoon.rpc.credentials.child_environment import child_environment

CLUSTER = {
    **dict.fromkeys(("HALFMOON_CLUSTER_SECRET", "HALFMOON_CLUSTER_SECRET_FILE", "HALFMOON_TLS_KEY"), "x"),
    **dict.fromkeys(("HALFMOON_OPERATOR_TOKEN", "HALFMOON_OPERATOR_TOKEN_FILE"), "x"),
    **dict.fromkeys(("HALFMOON_API_KEYS", "HALFMOON_API_KEYS_FILE", "HALFMOON_GATEWAY_API_KEY"), "x"),
    "HALFMOON_GATEWAY_LEDGER_URL": "postgresql://u:p@db/ledger",
    "HALFMOON_PLANNER_OPERATOR_TOKEN": "x",
    "HALFMOON_LEDGER_URL": "sqlite:///ledger.db",
    "HALFMOON_KVSTORE_COLD_URL": "redis://:p@redis",
}
OTHERS = {
    **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"), "x"),
    **dict.fromkeys(("GOOGLE_APPLICATION_CREDENTIALS", "AZURE_CLIENT_SECRET", "OPENAI_API_KEY", "GITHUB_TOKEN"), "x"),
    **dict.fromkeys(("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "PGPASSWORD", "REDISCLI_AUTH"), "x"),
    "DATABASE_URL": "postgres://u:p@db",
    "https_proxy": "http://u:p@proxy:3128",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=x",
    **dict.fromkeys(("DB_PASSPHRASE", "MYSQL_PWD", "SECRET_KEY_BASE", "GITHUB_PAT", "MY_TOKEN_2", "A\nB_TOKEN"), "x"),
    **dict.fromkeys(("PRIVATE_KEY_PEM", "CLIENT_SECRET_JSON", "HTTP_COOKIE", "AUTHORIZATION", "X.TOKEN", "key"), "x"),
    "DATABASE": "host=db Password = x",
    "ftp_proxy": "u:p@proxy:3128",
}
PLAIN = {
    "PATH": "/bin",
    "PWD": "/home/me",
    "OLDPWD": "/",
    "TOKENIZERS_PARALLELISM": "false",
    "REMOTE": "git@host:us/it",
    "HOME": "/home/me",
    "LANG": "C",
    "OMP_NUM_THREADS": "2",
    "CUDA_VISIBLE_DEVICES": "0",
    "HF_HOME": "/models",
    "http_proxy": "http://proxy:3128",
    "HALFMOON_CACHE_DIR": "/cache",
    "HALFMOON_DECODE_STEP_TOKENS": "64",
    "HALFMOON_SUPERVISED": "1",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://otel",
}
ALL = {**CLUSTER, **OTHERS, **PLAIN}
HUB = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "https_proxy"}
CLOUDS = {name for name in OTHERS if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))}


@pytest.mark.parametrize(
    ("module", "own"),
    [
        ("", set()),
        ("services.gateway.sandbox.sandbox_main", set()),
        ("services.planner.job_main", HUB),
        ("halfmoon.engine.checkpoint.prepare", HUB),
        ("services.decode", HUB | {"OTEL_EXPORTER_OTLP_HEADERS"}),
        ("services.prefill", HUB | {"OTEL_EXPORTER_OTLP_HEADERS"}),
        ("services.kvstore", CLOUDS | {"HALFMOON_KVSTORE_COLD_URL", "https_proxy", "OTEL_EXPORTER_OTLP_HEADERS"}),
        (
            "services.gateway",
            {"HALFMOON_GATEWAY_API_KEY", "HALFMOON_GATEWAY_LEDGER_URL", "PGPASSWORD", "OTEL_EXPORTER_OTLP_HEADERS"},
        ),
        ("console", set()),
    ],
)
def test_a_child_has_the_secrets_that_it_reads_and_everything_plain(module: str, own: set[str]) -> None:
    assert child_environment(ALL, module).keys() == PLAIN.keys() | own


def test_no_value_takes_long_to_look_at() -> None:
    """It took a minute: every colon of a value was tried as the end of a user's name."""
    assert child_environment({"PLAIN": "://" + ":" * 100_000}) == {"PLAIN": "://" + ":" * 100_000}
