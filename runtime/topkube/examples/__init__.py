"""Runnable examples. Each module is one: `python -m topkube.examples.char_gpt`."""
