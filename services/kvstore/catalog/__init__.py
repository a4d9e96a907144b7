"""What the store knows of its blocks: entries, the law of prefixes, eviction order and events. No I/O."""
