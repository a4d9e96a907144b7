"""`halfmoon.yaml`: one file that says everything about a system, and what is started from it."""
