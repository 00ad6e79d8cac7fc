"""Training data: how samples are split over ranks."""
