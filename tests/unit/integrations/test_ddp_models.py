"""The hook for DistributedDataParallel with models of many kinds, on four ranks: what it averages, and what it
refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import worlds

from topkube.errors import TrainingError

SCRIPT = Path(__file__).with_name("ddp_models_script.py")
Cases = dict[str, list[Any]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Return the result of each rank, or its error, for each case of the script."""
    ranks = worlds.run_torchrun(SCRIPT, tmp_path_factory.mktemp("ddp-models"))
    return {name: [results[name] for results in ranks] for name in ranks[0]}


def check_errors(results: list[Any], kind: type[Exception], text: str) -> None:
    for result in results:
        assert isinstance(result, kind), result
        assert text in str(result)


@pytest.mark.parametrize("name", ["half_of_the_ranks", "half_of_the_ranks_as_two_nodes"])
def test_gradients_are_averaged_over_the_process_group(cases: Cases, name: str) -> None:
    assert cases[name] == [1.5, 1.5, 3.5, 3.5]


def test_a_process_group_with_one_rank_of_each_node(cases: Cases) -> None:
    assert cases["one_rank_of_each_node"] == [2.0, 3.0, 2.0, 3.0]


def test_a_rank_outside_of_the_process_group_is_refused(cases: Cases) -> None:
    check_errors(cases["no_member"], TrainingError, "not a member of process_group")


def test_another_process_group_than_that_of_the_model_is_refused(cases: Cases) -> None:
    check_errors(cases["other_group_than_the_model"], TrainingError, "ddp_hook(process_group=model.process_group)")


@pytest.mark.parametrize("how", ["", "_in_one_backward", "_that_gc_does_not_list"])
def test_a_hook_is_for_one_model(cases: Cases, how: str) -> None:
    check_errors(cases["one_hook_for_two_models" + how], TrainingError, "call ddp_hook once per model")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("unused_on_all_ranks", 10),
        ("unused_on_three_ranks", 2.5),
        ("unused_with_two_ranks_per_node", 10),
        ("unused_in_small_buckets", 10),
        ("unused_with_views", 10),
        ("used_under_no_sync", 10),
        ("unused_part_of_the_graph", 10),
        ("unused_because_frozen", 10),
        ("unused_in_a_model_that_gc_does_not_list", 10),
    ],
)
def test_residuals_wait_for_a_step_that_uses_the_parameter(cases: Cases, name: str, expected: float) -> None:
    """torch drops what is sent of a parameter that no rank used. In the end every weight has its whole gradient."""
    for result in cases[name]:
        assert result == pytest.approx((expected, expected)), result


def test_an_unused_parameter_keeps_its_gradient(cases: Cases) -> None:
    assert cases["kept_gradient"] == [True] * 4


def test_steps_count_if_torch_leaves_out_a_bucket(cases: Cases) -> None:
    entries = cases["left_out_bucket"]
    assert entries[0] <= 4 * 25, "the second step is not sparse"
    assert entries == [entries[0]] * 4


def test_the_factor_of_a_scaler_must_be_known(cases: Cases) -> None:
    """In the inner backward pass of a reentrant checkpoint it is not."""
    assert cases["reentrant_checkpoint"] == [2.5] * 4
    assert cases["checkpoint_and_scaler"] == [10.0] * 4
    check_errors(cases["reentrant_checkpoint_and_scaler"], TrainingError, "use_reentrant=False")


def test_the_default_dtype_of_the_script_does_not_matter(cases: Cases) -> None:
    for usual, *others in cases["other_default_dtypes"]:
        assert others == [usual, usual]


def test_sparse_gradients_are_refused(cases: Cases) -> None:
    check_errors(cases["sparse_embedding"], TrainingError, "sparse=False")


def test_an_error_of_the_exchange_keeps_its_type(cases: Cases) -> None:
    """The thread that called backward raises it. The ranks are out of step after it, so the next backward fails too."""
    assert cases["error_in_the_thread"] == [["own backward", "next backward"]] * 4


def test_a_lost_rank_is_an_error_of_torch(cases: Cases) -> None:
    *others, lost = cases["lost_rank"]
    assert lost == []
    for kind, text in others:
        assert (kind, "Unable to cast" in text) == ("RuntimeError", False), text
        assert "gloo" in text or "onnection" in text
