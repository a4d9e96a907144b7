"""HTTP as such: who may call, what is received, how errors look. Knows nothing of models and workers."""
