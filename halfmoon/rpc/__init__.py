"""How a service runs: server life, interceptors, channels with deadlines, logs, bulk transfers."""
