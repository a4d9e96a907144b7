"""Many simulated workers in one process."""
