"""The environment of a child process: what its parent has, but no secret that the child does not read itself."""

from __future__ import annotations

import re
from collections.abc import Mapping

_CLOUDS = ("AWS_", "AZURE_", "GOOGLE_")
_WORDS = (
    "API_?KEYS?|KEYS?|TOKEN|SECRETS?|(PG)?PASS(WORD|WD|PHRASE|FILE)?|PWD|PAT|CREDENTIALS?|AUTH(ORIZATION)?|COOKIES?|DSN"
    "|HEADERS"
)
_SECRET_NAME = re.compile(
    rf"({'|'.join(_CLOUDS)})"
    r"|HALFMOON_(.*_URL|CLUSTER_SECRET.*|TLS_.*)$"
    rf"|(?!(OLD)?PWD$)(.*[^A-Z0-9])?({_WORDS})([^A-Z0-9].*)?$",  # one of the words, whatever else is in the name
    re.IGNORECASE | re.DOTALL,
)
_SECRET_VALUE = re.compile(r"(^|://)[^/\s:]*:[^/\s]*@|\bpassword\s*=", re.IGNORECASE)  # in a URL, or in a DSN

_OUTSIDE = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")  # a proxy's address may hold a password
_HUB = ("HF_", "HUGGING_FACE_", *_OUTSIDE)
_LEDGER = ("PG",)  # PGPASSWORD and the like

# By module: how the names of the secrets begin that it reads. The cluster's it is given apart, those of its role alone.
_READS: Mapping[str, tuple[str, ...]] = {
    "services.gateway": ("HALFMOON_GATEWAY_", "OTEL_", *_LEDGER),
    "services.planner": ("HALFMOON_PLANNER_", "OTEL_", *_LEDGER, *_HUB),
    "services.planner.job_main": _HUB,  # the shape of a model
    "services.prefill": ("HALFMOON_PREFILL_", "OTEL_", *_HUB),
    "services.decode": ("HALFMOON_DECODE_", "OTEL_", *_HUB),
    "services.simulation": ("HALFMOON_SIMULATION_", "OTEL_"),
    "services.kvstore": ("HALFMOON_KVSTORE_", "OTEL_", *_CLOUDS, *_OUTSIDE),  # the cold tier
    "halfmoon.engine.checkpoint.prepare": _HUB,
    "console": ("HALFMOON_CONSOLE_",),
}


def child_environment(inherited: Mapping[str, str], module: str = "") -> dict[str, str]:
    """Returns what a child that runs `python -m module` inherits. Another module than those above gets no secret."""
    own = _READS.get(module, ())
    return {
        name: value for name, value in inherited.items() if name.upper().startswith(own) or not _is_secret(name, value)
    }


def _is_secret(name: str, value: str) -> bool:
    return _SECRET_NAME.match(name) is not None or _SECRET_VALUE.search(value) is not None
