"""Predict training steps: profiles of models, a simulation of a step, and what follows from it for a cluster."""
