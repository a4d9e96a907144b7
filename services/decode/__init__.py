"""The decode service: from KV to tokens. The worker itself is halfmoon/worker."""
