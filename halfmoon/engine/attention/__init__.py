"""Attention back ends of the engine, and the watch that reports a step's progress layer by layer."""
