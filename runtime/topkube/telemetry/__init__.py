"""What a run tells about itself: seconds per phase, bytes per level, steps. Knows nothing of MPI or torch."""
