"""`python -m benchmarks.planner`: see `planner.py`."""

from benchmarks.planner.planner import main

if __name__ == "__main__":
    main()
