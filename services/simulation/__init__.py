"""Many simulated workers in one process.

Read in this order: __main__, settings, then halfmoon/worker/simulation and halfmoon/worker/simulated_engine.
"""
