"""One worker's compute: tokens and tensors, no network. asyncio only in async_engine.py.

Read in this order: request, scheduling/sequence, scheduling/scheduler, scheduling/block_pool, scheduling/prefix_cache,
engine_core, model_runner, engine, async_engine.
"""
