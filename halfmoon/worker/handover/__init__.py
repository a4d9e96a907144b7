"""KV on its way to decode workers: links, layers while they are computed, and encodings."""
