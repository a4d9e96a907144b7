"""`halfmoon plan`: layouts for a workload, and maps over its targets."""
