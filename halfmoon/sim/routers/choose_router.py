"""Chooses a run's router: the policies, or a faster one if there is nothing to decide or policies are not needed."""

from __future__ import annotations

from typing import Literal

from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.routers.least_loaded import LeastLoadedRouter
from halfmoon.sim.routers.policy_router import PolicyRouter
from halfmoon.sim.routers.single_route import SingleRouteRouter
from halfmoon.sim.routers.warm_up import WarmUpRouter
from halfmoon.sim.slo_tracker import SloTracker
from halfmoon.sim.worker.worker import SimWorker

PolicyUse = Literal["as needed", "always", "never", "once full"]
"""When policies place requests.

- as needed: if there is more than one route.
- always: in every case.
- never: for estimates.
- once full: for the passes that count, in a cluster filled without policies.
"""

AnyRouter = PolicyRouter | SingleRouteRouter | LeastLoadedRouter | WarmUpRouter


def choose_router(
    spec: ClusterSpec,
    workers: list[SimWorker],
    longest_output: int,
    use: PolicyUse,
    policy_router: PolicyRouter,
    tracker: SloTracker,
) -> AnyRouter:
    """The router for a cluster. Falls back to the policies if no faster router applies."""
    if use not in ("always", "never") and SingleRouteRouter.is_enough(spec):
        return SingleRouteRouter(workers, longest_output)
    if use in ("never", "once full") and LeastLoadedRouter.is_possible(spec):
        least_loaded = LeastLoadedRouter(workers, longest_output)
        return least_loaded if use == "never" else WarmUpRouter(least_loaded, policy_router, workers, tracker)
    return policy_router
