"""What an SRE watches TopKube with, as code: the metrics reference, dashboards, alerts. `python -m monitoring` writes
all generated files; a test fails when one is stale."""
