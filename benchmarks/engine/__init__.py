"""How fast an engine computes, by model, kernels, parallelism and offload."""
