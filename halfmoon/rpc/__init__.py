"""How a service runs: server life, interceptors, channels with deadlines, logs, bulk transfers.

Read in this order: peer, status, context, interceptor, server, service, transfer, store/kvstore_client.
"""
