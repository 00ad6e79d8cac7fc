"""Agreements of ranks during training, the communication thread, and collectives inside a model."""
