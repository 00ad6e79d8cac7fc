"""Reads of samples and row groups before their shard is in the cache, with checks of every byte."""
