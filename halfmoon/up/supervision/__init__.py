"""Keeping processes up: one child, its restarts, all of them together, their logs, what the terminal says of them."""
