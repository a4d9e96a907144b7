"""ONE WORKER'S COMPUTE. Tokens and tensors; no network; asyncio only in async_engine.py.

Read in this order: request, sequence, scheduler, block_pool, prefix_cache, model_runner, engine, async_engine.
"""
