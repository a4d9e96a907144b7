"""Which sequences run in the next step, with which blocks. Pure: no torch, no clock, no asyncio.

Read in this order: sequence, schedule, scheduler, sequence_queues, sequence_blocks, paused_sequences, speculation,
block_pool, spread_pool, prefix_cache, layer_gate, restore_order, restore_watch, step_counts.
"""
