"""The roles of a cluster's processes, and which of them may call which method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

ClusterRole = Literal["worker", "gateway", "store", "planner", "operator", "profiler"]

CLUSTER_ROLES: tuple[ClusterRole, ...] = get_args(ClusterRole)

OPEN_SERVICES = ("grpc.health.v1.Health",)  # anybody may ask whether a service is up

_GATEWAY: frozenset[ClusterRole] = frozenset({"gateway"})
_WORKER: frozenset[ClusterRole] = frozenset({"worker"})
_OPERATOR: frozenset[ClusterRole] = frozenset({"operator"})
_PLANNER: frozenset[ClusterRole] = frozenset({"planner"})
_SERVING: frozenset[ClusterRole] = frozenset(
    {"gateway", "profiler"}
)  # a profiler measures workers in a gateway's place

# A method that is not here is nobody's to call.
CALLERS: Mapping[str, frozenset[ClusterRole]] = {
    "/halfmoon.Cluster/Register": _WORKER,
    "/halfmoon.Prefill/Prefill": _SERVING,
    "/halfmoon.Decode/Tokens": _SERVING,
    "/halfmoon.Decode/Cancel": _SERVING,
    "/halfmoon.Decode/Settle": _GATEWAY,
    "/halfmoon.Decode/Find": _GATEWAY,
    "/halfmoon.Decode/Adopt": _GATEWAY,
    "/halfmoon.Decode/EmptyCache": _GATEWAY,
    "/halfmoon.KVTransfer/Push": frozenset({"worker", "profiler"}),
    "/halfmoon.RankKV/Fetch": _WORKER,
    "/halfmoon.RankKVBytes/Read": _WORKER,
    "/halfmoon.KVStore/Match": frozenset({"worker", "store"}),
    "/halfmoon.KVStore/Prefetch": _WORKER,
    "/halfmoon.KVStore/Borrow": frozenset({"worker", "store"}),
    "/halfmoon.KVStore/Take": _WORKER,
    "/halfmoon.KVStore/Replicate": _GATEWAY,
    "/halfmoon.KVStore/Watch": _GATEWAY,
    "/halfmoon.KVStore/Stats": frozenset({"gateway", "operator"}),
    "/halfmoon.KVStoreBytes/Put": _WORKER,
    "/halfmoon.KVStoreBytes/Get": frozenset({"worker", "store"}),
    "/halfmoon.KVStoreAdmin/List": _OPERATOR,
    "/halfmoon.KVStoreAdmin/Pin": _OPERATOR,
    "/halfmoon.KVStoreAdmin/Drop": _OPERATOR,
    "/halfmoon.KVStoreAdmin/Empty": frozenset({"gateway", "operator"}),
    "/halfmoon.KVStoreAdmin/Verify": _OPERATOR,
    "/halfmoon.Planner/Plan": _OPERATOR,
    "/halfmoon.Planner/ListPlans": _OPERATOR,
    "/halfmoon.Planner/Catalogue": _OPERATOR,
    "/halfmoon.Planner/PreviewApply": _OPERATOR,
    "/halfmoon.Planner/Apply": _OPERATOR,
    "/halfmoon.Fleet/Preview": _PLANNER,
    "/halfmoon.Fleet/Change": _PLANNER,
    "/halfmoon.Fleet/Add": _PLANNER,
}


def cluster_role(name: str) -> ClusterRole | None:
    """The role of that name; None for an unknown one."""
    return next((role for role in CLUSTER_ROLES if role == name), None)


def may_call(role: ClusterRole, method: str) -> bool:
    """Whether the table lets this role call the method, such as /halfmoon.Decode/Cancel."""
    return role in CALLERS.get(method, frozenset())


def is_open(method: str) -> bool:
    """Whether the method needs no credential."""
    return method.startswith("/") and method[1:].partition("/")[0] in OPEN_SERVICES
