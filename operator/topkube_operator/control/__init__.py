"""Carry out plans: the controller, the plan executor, the writer of children, leader election, Events, metrics, and the
poller of launchers."""
