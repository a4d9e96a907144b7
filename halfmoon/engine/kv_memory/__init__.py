"""The memory of one worker's KV: the arena of blocks, copies in and out, and who may copy when.

Read in this order: kv_arena, quantised_rows, kv_access, kv_by_ticket, coded_copies, kv_transfer, kv_watch,
canonical_kv, paused_kv, kv_budget, cuda_memory.
"""
