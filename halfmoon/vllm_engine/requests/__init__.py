"""What becomes of each request in the worker: its shared blocks, its tokens, what is reported of it."""
