"""Models: how long work takes and how much there is, learned from measurements. No clock, no cluster."""
