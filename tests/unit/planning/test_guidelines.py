"""What the planner recommends: links, batches and numbers of workers."""

from __future__ import annotations

import pytest

from topkube.algorithms import Algorithm, Machines, find_algorithm
from topkube.planning import guidelines
from topkube.planning.models import find_model
from topkube.planning.profile import Gradient, StepProfile
from topkube.planning.situation import Situation
from topkube.planning.step import Prediction, predict_step


def test_beyond_the_break_even_link_the_gain_is_too_small() -> None:
    profile = find_model("resnet50").build_profile(0.05)
    situation = Situation(Machines(16, 1, 1e9, 3e11))
    dense, sparse = find_algorithm("hierarchical"), find_algorithm("hitopk")
    even = guidelines.BreakEvenSearch(profile, situation, dense).find(sparse)
    assert even.link is not None

    def predict_gain(link: float) -> float:
        changed = guidelines.change_link(situation, link)
        return predict_step(profile, changed, dense).step / predict_step(profile, changed, sparse).step

    assert predict_gain(even.link / 2) > 1.03
    assert predict_gain(even.link) == pytest.approx(1 / (1 - guidelines.LEAST_SAVING), abs=0.01)
    assert predict_gain(even.link * 2) < 1 / (1 - guidelines.LEAST_SAVING)
    many = guidelines.change_nodes(situation, 4096)
    naive = find_algorithm("naive")
    assert guidelines.BreakEvenSearch(profile, many, dense).find(naive) == guidelines.BreakEven(None, False)


def test_break_even_links_of_all_algorithms_share_the_steps_of_the_dense_one(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted: list[tuple[str, float]] = []

    def count_predictions(profile: StepProfile, situation: Situation, algorithm: Algorithm) -> Prediction:
        predicted.append((algorithm.name, situation.machines.link))
        return predict_step(profile, situation, algorithm)

    monkeypatch.setattr(guidelines, "predict_step", count_predictions)
    profile, situation = find_model("resnet50").build_profile(0.05), Situation(Machines(16, 1, 1e9, 3e11))
    search = guidelines.BreakEvenSearch(profile, situation, find_algorithm("hierarchical"))
    assert all(search.find(find_algorithm(name)).link for name in ("hitopk", "int8", "acpsgd"))
    assert len(predicted) == len(set(predicted))


def test_the_recommended_batch_and_workers_are_the_first_that_suffice() -> None:
    profile, ring = find_model("resnet50").build_profile(0.02), find_algorithm("torus2d")
    situation = Situation(Machines(16, 8, 3e9, 3e11))
    factor = guidelines.find_batch_factor(profile, situation, ring, 0.8)
    assert factor is not None
    assert predict_step(profile.scale_batch(factor), situation, ring).efficiency >= 0.8
    assert predict_step(profile.scale_batch(factor * 0.97), situation, ring).efficiency < 0.8
    larger = profile.scale_batch(2 * factor)
    nodes = guidelines.find_most_nodes(larger, situation, ring, 0.8)
    assert predict_step(larger, guidelines.change_nodes(situation, nodes), ring).efficiency >= 0.8
    assert predict_step(larger, guidelines.change_nodes(situation, 2 * nodes), ring).efficiency < 0.8


def test_ranks_of_a_fixed_batch_follow_lemma_1_of_the_guidelines() -> None:
    """With the overhead ratio R, G ranks reach the efficiency (1 + R) / (1 + G R)."""
    profile = StepProfile("x", 1.0, (Gradient("w", 1, 2.0),), update=0.3)
    alone = predict_step(profile, Situation(Machines(1, 1, 1e9, 1e10)), find_algorithm("hitopk"))
    ranks = guidelines.count_ranks_of_fixed_batch(alone, 1, 0.8)
    efficiency = [(1 + 0.1) / (1 + count * 0.1) for count in (ranks, ranks + 1)]
    assert efficiency[0] >= 0.8 > efficiency[1]


def test_memory_bounds_the_batch() -> None:
    situation, model = Situation(Machines(2, 8, 1e9, 1e10)), find_model("7b")
    sparse = find_algorithm("hitopk")
    assert guidelines.count_most_samples(80e9, model.parameters, model.activations, sparse, situation) == 0
    assert guidelines.count_most_samples(141e9, model.parameters, model.activations, sparse, situation) == 2
