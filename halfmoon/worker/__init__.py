"""A WORKER PROCESS. One engine behind RPC: its two servicers, hand-over, registration. Which half it serves is data."""
