"""The script that `helm test` runs in the cluster, in the operator's image."""

import json
import os
import ssl
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


def wait_until(condition, problem):
    """Return the first true result of `condition`. Try for a minute, because an installation takes some time. Exit with
    `problem` if no result was true."""
    end, last_error = time.monotonic() + 60, None
    while time.monotonic() < end:
        try:
            if result := condition():
                return result
        except OSError as error:
            last_error = error
        time.sleep(0.5)
    raise SystemExit(f"{problem}. Last error: {last_error}")


def is_leading():
    """Return True if the replica that answers leads, or if it is ready and protects its metrics. Replicas answer in
    turn."""
    path = os.environ.get("METRICS_PATH", "/metrics")
    scheme, host, port = (os.environ[f"METRICS_{name}"] for name in ("SCHEME", "HOST", "PORT"))
    address = f"[{host}]" if ":" in host else host  # IPv6
    unverified = ssl._create_unverified_context()
    with urllib.request.urlopen(f"{scheme}://{address}:{port}{path}", timeout=5, context=unverified) as answer:
        lines = answer.read().decode().splitlines()
    if path != "/metrics":
        return True
    return any(float(line.split()[-1]) for line in lines if line.startswith("topkube_leader"))


def explain_refusal(job):
    """Return the API server's refusal of the job; empty if it would accept the job."""
    try:
        client.CustomObjectsApi().create_namespaced_custom_object(
            "topkube.dev", "v1alpha1", os.environ["NAMESPACE"], "trainingjobs", job, dry_run="All"
        )
    except client.ApiException as error:
        return json.loads(error.body)["message"]
    return ""


config.load_incluster_config()
wait_until(is_leading, "no replica leads within a minute. Next: read the operator's log")
print("a replica leads")
if reason := explain_refusal(JOB):
    raise SystemExit(f"a valid job is refused: {reason}")
print("a valid job is accepted")
# The TrainingJob definition itself refuses this mistake. Only the webhook refuses mistakes in the template.
mistakes = {"workers": {"workers": 0}}
if os.environ["WEBHOOK"] == "true":
    mistakes["command"] = {"template": {"spec": {"containers": [{"name": "worker", "image": "none"}]}}}
for field, change in mistakes.items():
    invalid_job = {**JOB, "spec": {**JOB["spec"], **change}}
    reason = wait_until(
        lambda job=invalid_job: explain_refusal(job), f"a job with {change} is accepted. Next: read the operator's log"
    )
    if field not in reason:
        raise SystemExit(f"a job with {change} is refused, but not for that: {reason}")
    print("an invalid job is refused:", reason)
