"""The prefill service: from a prompt to its KV and first token. The worker itself is halfmoon/worker."""
