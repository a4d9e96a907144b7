"""One engine over several devices: tensor and pipeline parallelism through torch.distributed.

Sequence parallelism has its own ranks: each has the whole model and some of the tokens.

Read in this order: grid, weights, links, rank, token_shares, ring_attention, sequence_rank, messages, followers,
follower, sharded_kv, spread_kv, runner.
"""
