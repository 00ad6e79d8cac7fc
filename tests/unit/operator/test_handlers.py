"""The settings of kopf."""

from __future__ import annotations

import itertools

import kopf

from topkube_operator.handlers import configure


def test_kopf_does_not_give_up_a_namespace_that_was_deleted() -> None:
    """After nine refused calls in one namespace, kopf ended the operator of all namespaces."""
    settings = kopf.OperatorSettings()
    configure(settings, is_clusterwide=False)
    pauses = settings.networking.error_backoffs
    assert not isinstance(pauses, float)
    for _ in range(2):  # kopf begins anew with each call
        assert list(itertools.islice(pauses, 100))[-1] == 30.0
