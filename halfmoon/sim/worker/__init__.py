"""One simulated worker: its queues, memory, batches and steps."""
