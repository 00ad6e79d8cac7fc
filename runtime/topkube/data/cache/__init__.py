"""The cache of a node: shards on disk, decoded samples in memory, and the readers of both."""
