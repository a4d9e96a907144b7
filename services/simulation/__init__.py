"""Many simulated workers in one process.

Read in this order: __main__, settings, then halfmoon/worker/simulated/simulation and
halfmoon/worker/simulated/simulated_engine.
"""
