"""The commands that talk to a cluster: submit, status, logs, suspend, resume, delete.

`api` is the connection; it raises a typed error with the next step if the cluster refuses a request. `jobs` reads a job
and its objects, and `watches` follows them. Each command has a module of its own. The Kubernetes client is loaded only
when a command runs.
"""
