"""Simulates a cluster without devices: the shipped policies place requests on modelled workers, on a fake clock.

Reading order: `cluster/cluster_spec.py` (what is simulated), `workloads/workload.py` (what arrives),
`latency_sources/latency_model.py` (how long a step takes), `simulation.py` (the event loop), `worker/worker.py` and
`worker/prompt_queue.py` (what one worker computes), `routers/policy_router.py` (placement), `role_control.py` (roles
that change), `result.py`.
"""
