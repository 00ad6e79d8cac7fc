"""The options that the examples share."""

from __future__ import annotations

import argparse

import pytest

from topkube.examples.options import add_common_options, read_aggregation


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_common_options(parser, steps=200, batch_size=8, optimizer="sgd")
    return parser.parse_args(words)


def test_the_warm_up_of_a_job_can_be_turned_off() -> None:
    """The samples set spec.aggregation.warmupSteps, and 0 is its default."""
    assert read_aggregation(parse("--warmup-steps", "0"))["warmup_steps"] == 0
    assert read_aggregation(parse())["warmup_steps"] is None, "the job's"


@pytest.mark.parametrize(
    "words", [("--warmup-steps", "-1"), ("--seed", "-1"), ("--seed", "x"), ("--steps", "0"), ("--density", "0")]
)
def test_wrong_numbers_are_refused(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err
