"""For all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No property fails because the machine is busy: what an example takes, and what it takes to draw one, says nothing. The
# first text that is drawn on a new machine alone takes seconds: a table of Unicode is made for it.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
