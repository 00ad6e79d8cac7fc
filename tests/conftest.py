"""For all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No property fails because the machine is busy, or because chance drew many examples that do not fit. On a new machine,
# the first text that is drawn takes seconds, because Hypothesis writes a table of Unicode. A test that suppresses other
# checks adds them to these: settings.default.suppress_health_check.
settings.register_profile(
    "untimed",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
settings.load_profile("untimed")
