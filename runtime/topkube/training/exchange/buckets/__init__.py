"""Parameters, the buckets that they are exchanged in, and the plan of buckets on which all ranks agree."""
