"""The parts of benchmarks/cache.py: a remote behind a slow link, datasets, contenders, and the ranks that read."""
