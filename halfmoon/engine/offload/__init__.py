"""KV beyond the device's memory: it lies in host memory, and each step has it come, layer by layer (KVPR)."""
