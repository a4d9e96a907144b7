"""One engine over several devices: tensor and pipeline parallelism through torch.distributed.

Read in this order: grid, weights, links, rank, messages, followers, follower, sharded_kv, runner.
"""
