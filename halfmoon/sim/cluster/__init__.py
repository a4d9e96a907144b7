"""The simulated cluster: its specification, its workers and their memory, steps and transfers."""
