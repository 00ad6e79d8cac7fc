"""The memory tier: decoded samples in files in memory, and the huge pages of these files."""
