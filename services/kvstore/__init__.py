"""The KV store: a pool of content-addressed KV blocks in tiers, from which any worker may load.

Read in this order: halfmoon/catalog/catalog, halfmoon/policy/eviction, tiers/allocator, tiers/dram, tiers/disk,
movement/write_behind, pool, servicer.
"""
