"""What runs inside vLLM's processes: our connector, in two halves, and our sampler."""
