"""Which configuration to run: for now, what fits in memory."""
