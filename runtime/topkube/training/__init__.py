"""The training loop: buckets, schedule, the distributed optimizer, checkpoints."""
