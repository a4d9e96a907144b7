"""ONE WORKER'S COMPUTE. Tokens and tensors; no network; asyncio only in async_engine.py."""
