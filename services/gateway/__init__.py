"""The gateway: an OpenAI-compatible HTTP server in front of prefill and decode workers.

Reading order:

1. `request.py`: the request, the one object that every stage fills in.
2. `generation_endpoints.py` and `generation.py`: its way from the body to the last byte.
3. `routing/early_rejection.py`: refused before its prompt is tokenized.
4. `routing/request_routing.py`: admission and placement of one output.
5. `routing/relay.py` and `routing/attempt.py`: prefill, decode and retries.
6. `cluster/token_router.py` and `routing/token_flow.py`: tokens on their way back.
7. `replies/replies.py`: tokens become a response.
8. `responses/conversations.py`, `detached.py`: responses that are kept, requests that no connection waits for.
9. `service.py`: how a gateway is put together, started and stopped.

Shelves import one way: each may import those before it in the order `cluster`, `http`, `sandbox`, `replies`,
`openai`, `progress`, `repeatable`, `request`, `detached_request` and `leased_tasks` (files), `telemetry`, `routing`,
`peers`, `control`, `responses`, `batches`. All may import `settings.py`; the other files of this folder import all.
"""
