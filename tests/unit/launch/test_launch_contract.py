"""The contract between the operator and the pods."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topkube.errors import LaunchError
from topkube.job import FirstFailure
from topkube.launch.contract import (
    LONGEST_DOMAINS,
    TERMINATION_MESSAGE_BYTES,
    VARIABLE_BYTES,
    Ending,
    ExpectedWorker,
    LauncherStatus,
    LaunchPlan,
    compute_worker_token,
    encode_domains,
    name_worker_pod,
    parse_domains,
)

WORKERS = (
    ExpectedWorker(index=0, attempt=1, pod="a-worker-0-1"),
    ExpectedWorker(index=1, attempt=2, pod="a-worker-1-2"),
)
PLAN = LaunchPlan(name="a", namespace="team", uid="1234", attempt=2, workers=WORKERS, slots=2)


def test_a_plan_survives_the_environment_and_newer_fields() -> None:
    assert LaunchPlan.read(PLAN.to_json()) == PLAN
    assert LaunchPlan.read(PLAN.to_json()[:-1] + ', "fromTheFuture": {"a": 1}}') == PLAN
    nested = '{"attempt": 1, "state": "Waiting", "progress": {"step": 3, "fromTheFuture": 1}}'
    progress = LauncherStatus.read(nested).progress
    assert progress is not None
    assert progress.step == 3


@pytest.mark.parametrize("attempts", [(1,), (1, 1, 7, 12345)])
@pytest.mark.parametrize("name", ["a", "n" * 63])
def test_the_plan_of_ten_thousand_workers_fits_a_variable(name: str, attempts: tuple[int, ...]) -> None:
    attempt_numbers = [attempts[index % len(attempts)] for index in range(10_000)]
    workers = tuple(
        ExpectedWorker(index=index, attempt=number, pod=name_worker_pod(name, PLAN.uid, index, number))
        for index, number in enumerate(attempt_numbers)
    )
    plan = PLAN.model_copy(update={"name": name, "workers": workers, "attempt": 12345})
    text = plan.to_json()
    assert len(f"TOPKUBE_LAUNCH={text}\0".encode()) < VARIABLE_BYTES
    assert LaunchPlan.read(text) == plan
    subprocess.run(["true"], env={"TOPKUBE_LAUNCH": text}, check=True)


def test_an_invalid_list_of_attempts_is_reported_with_its_field() -> None:
    with pytest.raises(LaunchError, match=r"workers\.1\.attempt"):
        LaunchPlan.read('{"name": "a", "namespace": "n", "uid": "u", "attempt": 1, "made": [1, "x"]}')


def test_a_malformed_plan_is_named_field_by_field() -> None:
    with pytest.raises(LaunchError, match=r"TOPKUBE_LAUNCH.*workers\.0\.index.*slots") as error:
        LaunchPlan.read(PLAN.to_json().replace('"index":0', '"index":-1').replace('"slots":2', '"slots":0'))
    assert error.value.exit_code == 2
    with pytest.raises(LaunchError, match="TOPKUBE_LAUNCH"):
        LaunchPlan.read("{")


def test_a_token_belongs_to_one_worker_of_one_attempt_of_one_job() -> None:
    tokens = {
        compute_worker_token(key, uid, index, attempt)
        for key in ("k", "l")
        for uid in ("u", "v")
        for index in (1, 11)
        for attempt in (1, 11)
    }
    assert len(tokens) == 16
    assert compute_worker_token("k\n", "u", 1, 1) == compute_worker_token("k", "u", 1, 1)


@given(st.text(max_size=4096), st.text(max_size=6000))
def test_the_termination_message_fits_the_limit_of_kubernetes(tail: str, message: str) -> None:
    failure = FirstFailure(
        pod="a-worker-0-1", rank=3, reason="OOMKilled", exit_code=137, message=message, log_tail=tail
    )
    text = Ending(attempt=1, state="Failed", exit_code=137, first_failure=failure).to_message()
    assert len(text.encode()) <= TERMINATION_MESSAGE_BYTES
    kept = Ending.read(text).first_failure
    assert kept is not None
    assert (kept.rank, kept.reason, kept.exit_code) == (3, "OOMKilled", 137)
    assert tail.endswith(kept.log_tail or "")
    assert message.startswith(kept.message or "")


def test_the_contract_imports_neither_torch_nor_mpi() -> None:
    script = "import sys, topkube.launch.contract; print([m for m in ('torch', 'mpi4py', 'numpy') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def test_ranks_are_ordered_by_domain() -> None:
    workers = tuple(ExpectedWorker(index=index, attempt=1, pod=f"j-worker-{index}-1") for index in range(4))
    plan = LaunchPlan(name="j", namespace="n", uid="u", attempt=1, workers=workers, slots=2)
    assert [plan.find_worker(rank).index for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    ordered = plan.reorder((1, 0, 1, 0))
    assert ordered.order == (1, 3, 0, 2)
    assert [ordered.find_worker(rank).index for rank in (*range(8), 99)] == [1, 1, 3, 3, 0, 0, 2, 2, 2]


_INVALID = "; 0; 0,1,2; 0,x; 0,-1; 0,1e5; 0,123456; 0*3; 0*1; 0*2,1; 0*0,1,0; 0*; *2; 0*99999999; 0*\u00b2; 0*2*1; 0*-2"


@pytest.mark.parametrize("text", [*_INVALID.split("; "), "0," + "1" * 9000])
def test_invalid_domains_are_ignored(text: str) -> None:
    assert parse_domains(text, 2) is None
    assert parse_domains("1,0", 2) == (1, 0)


def test_domains_of_ten_thousand_workers_fit_into_the_header() -> None:
    few, many = (0, 1, 0), tuple(index // 16 % 300 for index in range(10_000))
    assert encode_domains(few) == "0,1,0"
    assert encode_domains([7] * 5000) == "7*5000"
    text = encode_domains(many)
    assert len(text) <= LONGEST_DOMAINS
    assert parse_domains(text, 10_000) == many
    assert parse_domains(encode_domains(few), 3) == few
    scattered = encode_domains(index % 300 for index in range(10_000))
    assert len(scattered) > LONGEST_DOMAINS
    assert parse_domains(scattered, 10_000) is None
