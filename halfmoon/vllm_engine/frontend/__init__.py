"""vLLM as seen from the worker: its options, its `AsyncLLM`, the events of its cache."""
