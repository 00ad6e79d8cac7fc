"""Runnable examples: python -m topkube.examples.char_gpt."""
