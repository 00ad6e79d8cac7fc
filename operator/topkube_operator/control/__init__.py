"""Carry out plans: the controller, the plan executor, leader election, Events, metrics, and the poller of launchers."""
