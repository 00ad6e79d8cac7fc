"""Keep a copy of the cluster: the API client, the watchers, the watch cache, and the work queue."""
