"""The cache of a node: shards on disk, decoded samples in memory, and the readers of both.

`sample_reader.py` and `row_groups.py` read samples from shards. `shard_cache.py` opens shards: from `disk/`, or from
the remote. `memory/` has the decoded samples, and `early/` reads samples before their shard is in the cache.
"""
