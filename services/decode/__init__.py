"""KV -> tokens."""
