"""Checks that a worker can work with this gateway and with its present members."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.pb.gateway_pb2 import WorkerIdentity
from halfmoon.policy.models.latency import NUM_COEFFICIENTS
from halfmoon.rpc.layout_message import layout_from
from services.gateway.cluster.member import ROLES


def check_identity(
    identity: WorkerIdentity, model_fingerprint: str, adapters: Mapping[str, str], members: Iterable[WorkerIdentity]
) -> None:
    """Raises InvalidRequest for an unusable identity, and Incompatible for another model than the gateway's, a lack of
    one of its adapters, or a KV layout that cannot be exchanged with a member's."""
    if identity.role not in ROLES:
        raise InvalidRequest("a worker must say its role", param="role")
    for name in ("worker_id", "address", "context_tokens", "total_blocks"):
        if not getattr(identity, name):
            raise InvalidRequest(f"a worker must say its {name}", param=name)
    if identity.model_fingerprint != model_fingerprint:
        raise Incompatible(
            f"worker {identity.worker_id} serves model {identity.model_fingerprint}, "
            f"this gateway serves {model_fingerprint}: start all workers and gateways with the same --model and "
            "--quantization"
        )
    for name, fingerprint in adapters.items():
        if fingerprint not in identity.adapter_fingerprints:
            raise Incompatible(
                f"worker {identity.worker_id} lacks the adapter {name!r}, or has another version of it: start all "
                "workers and gateways with the same --lora"
            )
    for member in members:
        differing = _differing(identity, member)
        if member.worker_id != identity.worker_id and differing:
            raise Incompatible(
                f"worker {identity.worker_id} has {_named(differing, identity)}, "
                f"worker {member.worker_id} has {_named(differing, member)}: "
                "workers that exchange KV must agree in it"
            )
    layout_from(identity.layout)
    for coefficients in (identity.profile.prefill, identity.profile.step):
        if len(coefficients) not in (0, NUM_COEFFICIENTS) or not all(0 <= value < math.inf for value in coefficients):
            raise InvalidRequest("a latency profile has three coefficients, none below 0", param="profile")


def _differing(identity: WorkerIdentity, other: WorkerIdentity) -> list[str]:
    """The properties that two workers must share to exchange KV, and do not. Receivers convert another dtype."""
    own, others = _exchanged(identity), _exchanged(other)
    return [name for name in own if own[name] != others[name]]


def _exchanged(identity: WorkerIdentity) -> dict[str, int]:
    names = ("num_layers", "num_kv_heads", "head_dim", "block_tokens")
    return {name: getattr(identity.layout, name) for name in names} | {"kv_frame_version": identity.kv_frame_version}


def _named(names: Sequence[str], identity: WorkerIdentity) -> str:
    exchanged = _exchanged(identity)
    return ", ".join(f"{name} {exchanged[name]}" for name in names)
