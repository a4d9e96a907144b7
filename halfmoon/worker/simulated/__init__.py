"""A worker without an engine: a latency model in its place, links of a chosen speed, many workers in one process."""
