"""Parts of `benchmarks.chaos`. Read in this order: load, system, fault, trial, table; then the shelves of faults."""
