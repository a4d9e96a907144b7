"""One engine over several devices: tensor and pipeline parallelism through torch.distributed."""
