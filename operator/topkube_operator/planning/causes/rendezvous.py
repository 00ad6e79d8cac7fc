"""Messages about workers that do not call their launcher. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

from topkube.launch import contract
from topkube_operator.model.observed import Pod

_SUSPICIOUS_AFTER = timedelta(seconds=30)
_MOST_NAMED = 8
"""The most pods that a message names."""
_ALL_SILENT = (
    "Likely causes: nothing routes the address of the job's Service on their nodes (kube-proxy or its replacement), "
    f"a NetworkPolicy closes port {contract.LAUNCHER_PORT} of the launcher to them, or a service mesh intercepts the "
    "calls"
)
_SOME_SILENT = (
    "The others have. Likely causes: the nodes of these pods do not route the address of the job's Service, or a "
    f"NetworkPolicy closes port {contract.LAUNCHER_PORT} of the launcher to these nodes"
)


def find_suspicious_time(pods: Iterable[Pod]) -> datetime:
    """Return the time from which a missing call is suspicious, after all of `pods` have started."""
    starts = [started for pod in pods if (started := pod.container.started) is not None]
    return max(starts) + _SUSPICIOUS_AFTER if starts else datetime.max.replace(tzinfo=UTC)


def describe_missing_workers(workers: Sequence[str], missing: Sequence[int], *, with_causes: bool = False) -> str:
    """Return a message that names the workers that have not called. `workers` holds all pod names by index; `missing`
    holds indices. If `with_causes`, the message includes the likely causes and the next command."""
    silent = [workers[index] for index in missing if index < len(workers)]
    shown = ", ".join(silent[:_MOST_NAMED])
    shown += f" and {len(silent) - _MOST_NAMED} more" if len(silent) > _MOST_NAMED else ""
    message = f"{len(missing)} of {len(workers)} workers have not called the launcher: {shown}"
    if not with_causes or not silent:
        return message
    causes = _ALL_SILENT if len(missing) == len(workers) else _SOME_SILENT
    return f"{message}. {causes}. Next: kubectl logs {silent[0]} shows how its calls end"
