"""Which configuration to run: what fits in memory, the search for a layout, simulations, and plans of before."""
