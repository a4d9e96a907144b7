"""Checks of structured outputs, in processes that may die alone."""
