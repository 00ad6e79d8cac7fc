"""The disk tier: its directory, the folders of datasets, the publication of shards, and the log of their records."""
