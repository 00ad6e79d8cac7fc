"""Decide what to do about a job: (job, observed objects, now) -> plan. Pure: no I/O, no clock, no randomness."""
