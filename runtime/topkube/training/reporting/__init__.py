"""The reports of a run: norms, steps, and a progress bar in a terminal."""
