"""What clients have kept: responses, files, batches, and leases of the work on them."""
