"""What benchmarks/cache.py is made of: a remote behind a slow link, datasets, contenders, and the ranks that read."""
