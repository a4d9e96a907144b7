"""Which gateway a run has: the policies, or one that is quicker where they have nothing to say or are not asked."""

from __future__ import annotations

from typing import Literal

from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.cluster.worker import SimWorker
from halfmoon.sim.routers.least_loaded import LeastLoadedRouter
from halfmoon.sim.routers.policy_router import PolicyRouter
from halfmoon.sim.routers.single_route import SingleRouteRouter
from halfmoon.sim.routers.warm_up import WarmUpRouter
from halfmoon.sim.slo_tracker import SloTracker

PoliciesAsked = Literal["as needed", "always", "never", "once full"]
"""Where there is more than one way to go, in any case, never, or for the passes that count of a cluster that was filled
without them."""

AnyGateway = PolicyRouter | SingleRouteRouter | LeastLoadedRouter | WarmUpRouter


def router_of(
    spec: ClusterSpec,
    workers: list[SimWorker],
    longest_output: int,
    asked: PoliciesAsked,
    policies: PolicyRouter,
    misses: SloTracker,
) -> AnyGateway:
    """The policies where nothing else is possible."""
    if asked != "always" and asked != "never" and SingleRouteRouter.is_enough(spec):
        return SingleRouteRouter(workers, longest_output)
    if asked in ("never", "once full") and LeastLoadedRouter.is_possible(spec):
        lightest = LeastLoadedRouter(workers, longest_output)
        return lightest if asked == "never" else WarmUpRouter(lightest, policies, workers, misses)
    return policies
