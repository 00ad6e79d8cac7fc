"""What connects the ranks during training: agreements, the communication thread, and collectives inside a model."""
