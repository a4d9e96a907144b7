"""How blocks get to a holder and back: calls of a store, bytes beside them, shared memory on one host.

Read in this order: kvstore_client, block_reads, block_streams, chain, outbox.
"""
