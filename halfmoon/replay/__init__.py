"""`halfmoon replay`: plays a trace against a live gateway, in real time or faster, and measures how well it is served.

Reading order: `player.py` (when requests are sent), `client.py` (one request), `prompts.py` (its tokens), `outcome.py`
(the figures), `cluster.py` (the system under test), `virtual.py` (the same in the simulator), `sweep.py` (rates, for
`halfmoon bench`).
"""
