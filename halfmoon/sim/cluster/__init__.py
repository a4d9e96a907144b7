"""The simulated cluster: its specification, transfers between workers, stores."""
