"""The plans for the phases of a job: while an attempt runs, while the job is stopped, and after its end. Pure."""
