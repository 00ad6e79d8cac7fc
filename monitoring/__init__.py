"""Monitoring of TopKube as code: the metrics reference, dashboards, alerts. `python -m monitoring` writes all generated
files. A test fails if a file is stale."""
