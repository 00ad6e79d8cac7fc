"""Optimizers and wrappers of optimizers: LARS, LAMB, master weights, momentum correction."""
