"""The host that ranks run on: processes, environment, memory, shared memory, temporary folders."""
