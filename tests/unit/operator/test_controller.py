"""The controller with its threads and queue, on an API server in memory. tests/cluster has the real one."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from simulated import job, merged

from topkube.job import KIND
from topkube_operator import names
from topkube_operator.cluster import ApiError
from topkube_operator.controller import Controller
from topkube_operator.metrics import OperatorMetrics
from topkube_operator.observed import Policy, written
from topkube_operator.queue import WorkQueue
from topkube_operator.store import Store

KEY = ("team", "train")
Thing = dict[str, Any]


class Server:
    """Creates, reads and patches; refuses writes while `acting` is false, as `Cluster` does."""

    def __init__(self) -> None:
        self.acting, self.things, self.lock = True, dict[tuple[str, ...], Thing](), threading.Lock()
        self.before_create: Callable[[Thing], None] = lambda manifest: None
        self._numbers = itertools.count(1)

    def keep(self, thing: Thing) -> Thing:
        thing = copy.deepcopy(thing)
        number, metadata = next(self._numbers), thing["metadata"]
        metadata.update(uid=metadata.get("uid") or f"uid-{number}", resourceVersion=str(number))
        if thing["kind"] == "Service":
            thing["spec"].setdefault("clusterIP", "10.96.0.9")
        self.things[thing["kind"], metadata["namespace"], metadata["name"]] = thing
        return copy.deepcopy(thing)

    def create(self, manifest: Thing) -> Thing:
        self.before_create(manifest)
        with self.lock:
            self._may_write()
            metadata = manifest["metadata"]
            if (manifest["kind"], metadata["namespace"], metadata["name"]) in self.things:
                raise ApiError(409, "exists", "AlreadyExists")
            return self.keep(manifest)

    def get(self, *name: str) -> Thing:
        with self.lock:
            return copy.deepcopy(self.things[name])

    def patch(self, kind: str, namespace: str, name: str, patch: Thing, subresource: str = "") -> Thing:
        with self.lock:
            self._may_write()
            before = self.things[kind, namespace, name]
            patch["metadata"].pop("resourceVersion", None)
            return self.keep(merged(before, patch))

    def delete(self, kind: str, namespace: str, name: str, uid: str, *, ended: bool = False) -> Thing:
        with self.lock:
            self._may_write()
            found = self.things[kind, namespace, name]
            assert found["metadata"]["uid"] == uid
            if ended:
                del self.things[kind, namespace, name]
            return found

    def names(self, kind: str) -> set[str]:
        with self.lock:
            return {name for found, _, name in self.things if found == kind}

    def _may_write(self) -> None:
        if not self.acting:
            raise ApiError(0, "this replica does not lead", "NotLeading")


class Silent:
    def record(self, metadata: Thing, events: Any) -> None:
        """Events are not looked at here."""


class House:
    """A controller that runs."""

    def __init__(self) -> None:
        self.server, self.store, self.queue = Server(), Store(), WorkQueue()
        server: Any = self.server
        recorder: Any = Silent()
        self.controller = Controller(
            server,
            self.store,
            self.queue,
            recorder,
            OperatorMetrics(self.store.jobs),
            lambda _: Policy(seed=b"s" * 32),
            lambda: self.server.acting,
        )
        self.controller.start()

    def comes(self, name: str = "train") -> None:
        """A job is created, and kopf tells of it, once."""
        made = job()
        made["metadata"] |= {"name": name, "uid": f"uid-of-{name}"}
        self.store.put_job(self.server.keep(made))
        self.queue.add(("team", name))

    def rests(self) -> bool:
        return self.queue.oldest() == 0

    def condition(self, kind: str) -> Thing:
        status = self.server.get(KIND, *KEY).get("status") or {}
        return next((one for one in status.get("conditions") or () if one["type"] == kind), {})


@pytest.fixture
def house() -> Iterator[House]:
    found = House()
    yield found
    found.controller.stop()


def wait_until(holds: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_a_job_that_came_before_this_replica_could_write_is_taken_up_without_another_event(house: House) -> None:
    house.server.acting = False  # it has not listed everything yet
    house.comes()
    wait_until(house.rests)
    assert house.server.names("Pod") == set()
    house.server.acting = True
    wait_until(lambda: "train-launcher-1" in house.server.names("Pod"))


def test_what_a_late_renewal_of_the_lease_interrupted_is_finished(house: House) -> None:
    def lapse(manifest: Thing) -> None:
        house.server.acting = False

    house.server.before_create = lapse
    house.comes()
    wait_until(lambda: not house.server.acting and house.rests())
    assert house.server.get(KIND, *KEY)["status"]["attempt"] == 1, "the status was written"
    assert house.server.names("Pod") == set()
    house.server.before_create = lambda manifest: None
    house.server.acting = True
    wait_until(lambda: "train-launcher-1" in house.server.names("Pod"))


def test_an_object_of_another_job_is_said_to_be_somebody_elses(house: House) -> None:
    house.comes("other")
    wait_until(lambda: house.server.names("Service") == {"other"})
    owner = house.server.get("Service", "team", "other")["metadata"]["ownerReferences"]
    labels = {names.JOB_NAME: "other"}
    metadata = {"name": "train", "namespace": "team", "ownerReferences": owner, "labels": labels}
    house.server.keep({"kind": "Service", "metadata": metadata, "spec": {}})
    house.comes()
    wait_until(lambda: house.condition("Created").get("reason") == "ForeignObject")
    assert "does not belong to this job" in house.condition("Created")["message"]


def test_what_an_earlier_job_of_the_name_left_is_waited_for(house: House) -> None:
    house.comes("other")
    wait_until(lambda: house.server.names("Service") == {"other"})
    owner = copy.deepcopy(house.server.get("Service", "team", "other")["metadata"]["ownerReferences"])
    owner[0] |= {"name": "train", "uid": "of-a-job-that-is-gone"}
    metadata = {"name": "train", "namespace": "team", "ownerReferences": owner, "labels": {}}
    house.server.keep({"kind": "Service", "metadata": metadata, "spec": {}})
    house.comes()
    wait_until(lambda: house.condition("Created").get("reason") == "Terminating")
    with house.server.lock:
        del house.server.things["Service", "team", "train"]  # the garbage collector was there
    wait_until(lambda: "train-launcher-1" in house.server.names("Pod"))


@pytest.mark.parametrize("phase", ["Pending", "Failed"])
def test_a_kubelet_that_holds_what_does_not_run_keeps_no_deleted_job(house: House, phase: str) -> None:
    """The garbage collector has asked the pods to end, and the job is gone."""
    house.comes()
    wait_until(lambda: "train-launcher-1" in house.server.names("Pod"))
    pods = [thing for (kind, *_), thing in house.server.things.items() if kind == "Pod"]
    asked = datetime.now(UTC) - timedelta(seconds=4)
    times = {"deletionTimestamp": written(asked + timedelta(seconds=30)), "deletionGracePeriodSeconds": 30}
    over = {"terminated": {"exitCode": 1, "startedAt": written(asked), "finishedAt": written(asked)}}
    for pod in pods:
        name = pod["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"]
        containers = [{"name": name, "state": over if phase == "Failed" else {"waiting": {}}}]
        changed = {**pod, "status": {"phase": phase, "containerStatuses": containers}}
        changed["metadata"] = {**pod["metadata"], **times}
        house.store.put("Pod", house.server.keep(changed))
    house.store.remove_job(KEY, "uid-of-train")
    house.queue.add(KEY)
    wait_until(lambda: house.server.names("Pod") == set())
