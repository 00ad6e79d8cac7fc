"""Runnable examples: `python -m topkube.examples.char_gpt`, `python -m topkube.examples.digits_cnn`."""
