"""Formats of datasets: the division into shards, tar archives, and the positions of samples in a shard."""
