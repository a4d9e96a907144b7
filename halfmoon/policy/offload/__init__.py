"""What of a worker lies in host memory, and what is computed again instead of loaded."""
