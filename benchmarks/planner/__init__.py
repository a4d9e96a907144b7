"""How the planner compares with others, and how good its plans are."""
