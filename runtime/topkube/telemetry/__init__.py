"""Telemetry of a run: seconds per phase, bytes per level, steps. It imports neither MPI nor torch."""
