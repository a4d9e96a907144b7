"""Measures live workers over their own RPCs, as gateways and other workers use them.

Reading order: `profiler.py` (a whole profile), `target.py` (the workers), `sweep.py` (the points), `measuring.py` and
`probe.py` (how a point is measured), `token_watch.py` (decode steps), `served_request.py` (requests through the
gateway), `fitted_contention.py` (interference).
"""
