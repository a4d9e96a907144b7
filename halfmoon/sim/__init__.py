"""A cluster without devices: workloads, latency models, workers simulated on a fake clock, the shipped policies."""
