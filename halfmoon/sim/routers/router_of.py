"""Which gateway a run has: the policies, or one that is quicker where they have nothing to say or are not asked."""

from __future__ import annotations

from typing import Literal

from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.cluster.worker import SimWorker
from halfmoon.sim.routers.least_loaded import LightestChoice
from halfmoon.sim.routers.policy_router import SimGateway
from halfmoon.sim.routers.single_route import SoleChoice
from halfmoon.sim.routers.warm_up import WarmChoice
from halfmoon.sim.slo_tracker import Misses

PoliciesAsked = Literal["as needed", "always", "never", "once full"]
"""Where there is more than one way to go, in any case, never, or for the passes that count of a cluster that was filled
without them."""

AnyGateway = SimGateway | SoleChoice | LightestChoice | WarmChoice


def gateway_of(
    spec: ClusterSpec,
    workers: list[SimWorker],
    longest_output: int,
    asked: PoliciesAsked,
    policies: SimGateway,
    misses: Misses,
) -> AnyGateway:
    """The policies where nothing else is possible."""
    if asked != "always" and asked != "never" and SoleChoice.is_enough(spec):
        return SoleChoice(workers, longest_output)
    if asked in ("never", "once full") and LightestChoice.is_possible(spec):
        lightest = LightestChoice(workers, longest_output)
        return lightest if asked == "never" else WarmChoice(lightest, policies, workers, misses)
    return policies
