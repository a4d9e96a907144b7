"""Decisions: pure functions of a cluster view. The gateway runs them live, the simulator on a fake clock.

Shelves import one way: models <- view <- values <- forecast <- placement <- admission <- scaling. In reading order:

1. `values.py`: what is placed, and what is predicted of it.
2. `placement/place.py`: `place`, Mooncake's Algorithm 1 on one screen.
3. `placement/ranking.py`: the cost of each worker, by placement mode.
4. `admission/admission_controller.py`: `decide` places a request, degrades it, and admits or refuses it.
5. `view/cluster_view.py`: the columns that decisions read.
6. `forecast/request_forecast.py`: the answers to what placement and admission ask.
7. `forecast/prefill_queue_model.py`: one worker's queue, step by step.
8. `models/refinement.py`: how latency models follow what workers measure.
9. `scaling/autopilot.py`: which roles the workers should have.
"""
