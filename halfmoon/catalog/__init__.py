"""What a store knows of its blocks: entries, the law of fragments, the order of eviction. No bytes, no I/O, no clock.

Read in this order: block_identity, entry, fragments, catalog, eviction_order, fair_queue,
tenant_accounts.
"""
