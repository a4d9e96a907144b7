"""A worker's use of the store: restoring known prefixes and writing new blocks."""
