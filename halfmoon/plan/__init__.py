"""Which workers, how many and with what parallelism: the search for a layout over the simulator."""
