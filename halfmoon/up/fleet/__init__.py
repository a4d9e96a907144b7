"""The workers that `halfmoon up` runs, and how the planner changes them while they serve."""
