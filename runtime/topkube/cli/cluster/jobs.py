"""A job on a cluster and its objects, as plain data."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from topkube.cli.cluster.api import Api, build_path
from topkube.errors import ClusterError
from topkube.job.crd import PLURAL
from topkube.job.training_job import API_VERSION, KIND

JOB_LABEL, ROLE_LABEL, INDEX_LABEL, ATTEMPT_LABEL = (
    f"topkube.dev/{name}" for name in ("job-name", "role", "worker-index", "attempt")
)
DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
FINISHED_PHASES = ("Succeeded", "Failed")
_NO_DNS = "MissingClusterDNS"  # not shown: jobs need no DNS
SOME_PODS = 20
"""The pods of a job that a wait for their end reads at a time."""
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All but tabs and line ends."""
TIMEOUT_CODE = 124
"""Exit code of a command whose --timeout has passed, like that of timeout(1)."""


def build_job_path(api: Api, name: str | None = None) -> str:
    """Return the URL path of a job, or of all jobs of the namespace."""
    return build_path(api.namespace, PLURAL, name, API_VERSION)


def find_job(api: Api, name: str) -> dict[str, Any]:
    """Return the stored job. Raises ClusterError with the nearest names if there is no job of this name."""
    if not name:
        raise ClusterError(
            "the job's name is empty", cause="a shell variable is not set", next_step="topkube status: all jobs"
        )
    try:
        return api.get(build_job_path(api, name))
    except ClusterError as error:
        if error.status != 404 or error.unknown_kind or "no namespace" in str(error):
            raise
    raise ClusterError(
        f"there is no TrainingJob {name} in namespace {api.namespace}{_describe_near_jobs(api, name)}",
        status=404,
        cause="it was deleted, it has another name, or it is in another namespace",
        next_step="topkube status --all-namespaces",
    )


def _describe_near_jobs(api: Api, name: str) -> str:
    """Return the end of a sentence with the jobs whose names are near; nothing if this account may not list jobs."""
    try:
        names = [job["metadata"]["name"] for job in list_jobs(api)]
    except ClusterError:
        return ""
    near = difflib.get_close_matches(name, names, 3, 0.5) or names[:3]
    return f"; jobs are {', '.join(near)}" if near else "; there are no jobs"


def list_jobs(api: Api, everywhere: bool = False) -> list[dict[str, Any]]:
    """Return the jobs of the namespace, or of all namespaces."""
    path = build_path(None if everywhere else api.namespace, PLURAL, group=API_VERSION)
    return list(api.get(path).get("items") or ())


def list_pods(api: Api, name: str, uid: str | None = None, workers: list[int] | None = None) -> list[dict[str, Any]]:
    """Return the job's pods: the launcher first, then workers by index, older pods first. With `uid`, pods that an
    earlier job of the same name has left are not returned. With `workers`, only the pods of these workers are."""
    pods = api.get(build_path(api.namespace, "pods"), **build_pod_selector(name, workers)).get("items") or []
    return sort_pods(select_own_pods(pods, uid))


def list_some_pods(api: Api, name: str, uid: str | None) -> list[dict[str, Any]]:
    """Return up to SOME_PODS of the job's pods, and an empty list if the job has none. A wait that repeats must not
    read all pods of a large job each time."""
    query: dict[str, Any] = {**build_pod_selector(name), "limit": SOME_PODS}
    while True:
        page = api.get(build_path(api.namespace, "pods"), **query)
        own = select_own_pods(page.get("items") or [], uid)
        query["continue"] = (page.get("metadata") or {}).get("continue")
        if own or not query["continue"]:
            return sort_pods(own)


def build_pod_selector(name: str, workers: list[int] | None = None) -> dict[str, str]:
    """Return the query that selects the pods of a job; of some of its workers, if `workers` names any."""
    selected = f"{JOB_LABEL}={name}"
    if workers and min(workers) >= 0:
        selected += f",{INDEX_LABEL} in ({','.join(map(str, workers))})"
    return {"labelSelector": selected}


def select_own_pods(pods: Iterable[dict[str, Any]], uid: str | None) -> list[dict[str, Any]]:
    """Return the pods that belong to the job with this UID; all pods if it is None."""
    return [pod for pod in pods if uid is None or not _is_of_another_job(pod, uid)]


def sort_pods(pods: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the pods in the order in which they are shown."""
    return sorted(pods, key=lambda pod: (read_index(pod), read_attempt(pod), pod["metadata"]["name"]))


def _is_of_another_job(pod: dict[str, Any], uid: str) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(owner.get("kind") == KIND and owner.get("uid") != uid for owner in owners)


def read_index(pod: dict[str, Any]) -> int:
    """Return the worker's index; -1 for a launcher."""
    return _parse_number(pod["metadata"].get("labels", {}).get(INDEX_LABEL), -1)


def read_attempt(pod: dict[str, Any]) -> int:
    """Return the attempt for which the pod was created."""
    return _parse_number(pod["metadata"].get("labels", {}).get(ATTEMPT_LABEL), 0)


def find_main_container(pod: dict[str, Any]) -> str:
    """Return the name of the container that trains, or that starts MPI."""
    named = (pod["metadata"].get("annotations") or {}).get(DEFAULT_CONTAINER)
    return str(named or pod["spec"]["containers"][0]["name"])


def read_container_state(pod: dict[str, Any], container: str = "") -> tuple[str, dict[str, Any]]:
    """Return ('waiting' | 'running' | 'terminated', details) of a container; of the main container if none is named."""
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        if status["name"] == (container or find_main_container(pod)):
            for state, details in (status.get("state") or {}).items():
                return state, details or {}
    return "waiting", {}


def list_events(api: Api, job: dict[str, Any], pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of the job and the warnings of its pods, oldest first."""
    path = build_path(api.namespace, "events")
    name, uid = job["metadata"]["name"], job["metadata"].get("uid")
    selector = f"involvedObject.kind=TrainingJob,involvedObject.name={name}"
    stored = api.get(path, fieldSelector=selector).get("items") or []
    events = [event for event in stored if event["involvedObject"].get("uid") in (None, "", uid)]
    own = {pod["metadata"]["name"] for pod in pods}
    if own:
        warnings = api.get(path, fieldSelector="involvedObject.kind=Pod,type=Warning").get("items") or []
        warnings = [event for event in warnings if event.get("reason") != _NO_DNS]
        events += [event for event in warnings if event["involvedObject"].get("name") in own]
    return sorted(events, key=read_event_time)


def read_event_time(event: dict[str, Any]) -> str:
    """Return the time when the event was last seen."""
    return str(
        event.get("lastTimestamp")
        or (event.get("series") or {}).get("lastObservedTime")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
        or ""
    )


def read_phase(job: dict[str, Any]) -> str:
    """Return the job's phase: Pending until the operator writes another."""
    return str((job.get("status") or {}).get("phase") or "Pending")


def find_waiting_reason(job: dict[str, Any]) -> str:
    """Return what a job that does not run yet waits for, on one line; an empty text if it runs or nothing is known."""
    conditions = {entry.get("type"): entry for entry in (job.get("status") or {}).get("conditions") or ()}
    if read_phase(job) not in ("Pending", "Starting", "Restarting"):
        return ""
    return join_lines(str((conditions.get("Running") or {}).get("message") or ""))


def print_line(text: str) -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


def join_lines(text: str) -> str:
    """Return a message of several lines as one line."""
    return " ".join(text.split())


def show_control_characters(text: str) -> str:
    """Return text with its control characters as kubectl shows them: ESC as ^[. A job's code writes the messages of its
    status, and must not clear or rewrite the terminal of a person who looks at them."""
    return _CONTROL_CHARACTERS.sub(lambda found: "^" + chr(ord(found[0]) % 32 + 64), text)


def find_exit_code(job: dict[str, Any]) -> int:
    """Return 0 if the job succeeded, and the exit code of the first rank that failed if it failed."""
    if read_phase(job) == "Succeeded":
        return 0
    code = ((job.get("status") or {}).get("firstFailure") or {}).get("exitCode")
    return code if isinstance(code, int) and 0 < code < 256 else 1


def _parse_number(text: Any, otherwise: int) -> int:
    try:
        return int(text)
    except (TypeError, ValueError):
        return otherwise
