"""`halfmoon replay`: plays a trace against a live gateway, in real time or faster, and measures how well it is served.

Reading order: `player.py` (when requests are sent), `client.py` (one request), `prompts.py` (its tokens), `outcome.py`
(the figures), `report.py` (side by side), `cluster.py` (the system under test), `virtual.py` (in the simulator).

For `halfmoon bench`: `sessions.py` (conversations and agents' jobs), `bench_load.py` (what a point sends), `sweep.py`
(points, on several servers by turns), `bench_report.py`.
"""
