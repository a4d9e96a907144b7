"""The planner service: runs plan searches, lists stored plans and applies them to the running workers.

Read in this order: servicer, wire, jobs, job_queue, job_process, job, job_main, kept_plans, fleet.
"""
