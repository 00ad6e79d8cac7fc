"""The output of ranks: their logs, the output of their pod, and the report of how each rank ended."""
