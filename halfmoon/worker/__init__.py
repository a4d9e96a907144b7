"""The worker process: one engine behind RPC, with hand-over, registration and access to the store.

The setting `role` decides which phase it serves: prefill, decode or both.

Read in this order: main, engine_host, joined_rank, membership/registration, servicers/prefill_servicer,
servicers/prefill_request_scope, handover/layerwise_sender, servicers/decode_servicer, servicers/cache_servicer,
servicers/token_streams, servicers/kept_answers, store/restorer.
"""
