"""The commands that talk to a cluster: submit, status, logs, delete.

`api` is the connection and turns every refusal into a typed error with the next step; `jobs` reads what a job consists
of; one module per command does the rest. The Kubernetes client is loaded only when a command runs.
"""
