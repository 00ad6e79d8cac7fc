"""The base of the data layer: batches, file locks, permissions, limits of open files, counters."""
