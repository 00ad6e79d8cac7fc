"""Answer callers in the cluster, within bounds: probes, metrics, and the validating webhook."""
