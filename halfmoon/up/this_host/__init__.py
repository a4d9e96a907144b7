"""What the services of one host divide among themselves: cores, GPUs and ports."""
