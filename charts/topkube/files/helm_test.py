"""What `helm test` runs in the cluster, in the operator's image."""

import json
import os
import time
import urllib.request

from kubernetes import client, config

JOB = {
    "apiVersion": "topkube.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "helm-test"},
    "spec": {
        "workers": 1,
        "template": {"spec": {"containers": [{"name": "worker", "image": "none", "command": ["python"]}]}},
    },
}


def leaders() -> float:
    with urllib.request.urlopen(os.environ["METRICS"] + "/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("topkube_leader"))


def refused(job: dict) -> str:
    """What the API server says against the job; empty where it would take it."""
    try:
        client.CustomObjectsApi().create_namespaced_custom_object(
            "topkube.dev", "v1alpha1", os.environ["NAMESPACE"], "trainingjobs", job, dry_run="All"
        )
    except client.ApiException as error:
        return json.loads(error.body)["message"]
    return ""


config.load_incluster_config()
end = time.monotonic() + 60
while not (found := leaders()) and time.monotonic() < end:  # replicas answer in turn, and one of them leads
    time.sleep(0.5)
assert found, "no replica leads: read the operator's log"
print("a replica leads")
reason = refused(JOB)
assert not reason, f"a good job is refused: {reason}"
print("a good job is taken")
reason = refused({**JOB, "spec": {**JOB["spec"], "workers": 0}})
assert "workers" in reason, f"a job with 0 workers is not refused for that: {reason!r}"
print("a bad job is refused:", reason)
