"""Files and batches: requests from a file, run when nobody else needs the workers."""
