"""The planner: what fits in memory, the search for a cluster layout, simulations, and plans made earlier.

Read in this order: servicer, jobs, job_queue, job, job_process, fleet, kept_plans.
"""
