"""The worker process: one engine behind RPC, with hand-over, registration and access to the store.

The setting `role` decides which phase it serves: prefill, decode or both.

Read in this order: main, engine_host, joined_rank, membership/registration, prefill_servicer, prefill_request_scope,
layerwise_sender, decode_servicer, cache_servicer, token_streams, kept_answers, store/restorer.
"""
