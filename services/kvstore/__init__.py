"""The pool: content-addressed KV blocks in memory that any worker may fetch."""
