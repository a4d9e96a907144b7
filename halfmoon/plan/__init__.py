"""Plans a cluster: which workers, how many, and with what parallelism, found by searching over the simulator.

Reading order: `request.py` and `problem.py` (what is asked), `layout.py` (what is decided), `planning.py` (the entry
point), `search/goodput.py` (what a cluster sustains), `search/search.py`, `search/search_cheapest.py` and
`search/search_goodput.py` (the two searches), `targets/target_map.py` (maps over targets), `plan_file.py` (the result).
"""
