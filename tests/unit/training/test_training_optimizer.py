"""DistributedOptimizer on one rank: what it refuses, what it adds, and that it is a torch optimizer."""

from __future__ import annotations

import copy
import gc
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import topkube
from topkube.errors import ArgumentError, TrainingError, WorldError
from topkube.settings import Settings
from topkube.telemetry.progress import read_records
from topkube.world.world import open_worlds
from unit.training.one_rank import SAM, Lookahead, build_model, build_optimizer, run_backward


@pytest.fixture(autouse=True)
def world() -> None:
    topkube.init()
    torch.manual_seed(0)


def test_an_optimizer_needs_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_worlds, "whole", None)
    with pytest.raises(WorldError, match="init"):
        build_optimizer(build_model())


def test_steps_of_a_script_with_its_own_loop_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each step is reported once: by the first optimizer that steps, or by the run, which has more values."""
    world = topkube.world.current()
    monkeypatch.setattr(world, "run_directory", tmp_path)
    monkeypatch.setattr(world, "cache", {**world.cache})
    world.cache.pop("reporter of steps", None)

    def list_reported_steps() -> list[int]:
        return [record.step for record, _ in read_records(tmp_path / "progress.jsonl")]

    model, other = build_model(), build_model()
    optimizer, second = build_optimizer(model), build_optimizer(other)
    for _ in range(3):
        run_backward(model)
        optimizer.step()
        run_backward(other)
        second.step()
    assert list_reported_steps() == [1, 2, 3]
    with topkube.checkpointing(model, optimizer, settings=Settings(run_directory=str(tmp_path / "run"))) as run:
        for _ in run.progress([torch.ones(1)] * 2):
            run_backward(model)
            optimizer.step()
    assert list_reported_steps() == [1, 2, 3]


def test_names_that_do_not_fit_the_optimizer_are_refused() -> None:
    model, other = build_model(), build_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="twice"):
        topkube.DistributedOptimizer(plain, [*model.named_parameters(), *model.named_parameters()])
    with pytest.raises(ArgumentError, match="6 of the optimizer's 6 parameters"):
        topkube.DistributedOptimizer(plain, other.named_parameters())
    with pytest.raises(ArgumentError, match="pairs"):
        topkube.DistributedOptimizer(plain, model.parameters())
    frozen = torch.zeros(3).to(torch.float8_e4m3fn)
    model.register_parameter("frozen", nn.Parameter(frozen, requires_grad=False))
    with pytest.raises(ArgumentError, match="float8_e4m3fn"):
        build_optimizer(model)


def test_quantized_weights_of_integers_stay_as_they_are() -> None:
    """They never have a gradient, and torch's optimizers leave them alone as well."""
    model = build_model()
    model.register_parameter("quantized", nn.Parameter(torch.arange(3, dtype=torch.int8), requires_grad=False))
    optimizer = build_optimizer(model)
    run_backward(model)
    optimizer.step()
    codes = nn.Parameter(torch.arange(5, dtype=torch.uint8), requires_grad=False)
    optimizer.add_param_group({"params": [("codes", codes), ("scale", nn.Parameter(torch.ones(1)))]})
    run_backward(model)
    optimizer.step()
    assert model.quantized.tolist() == [0, 1, 2]
    assert codes.tolist() == [0, 1, 2, 3, 4]


def test_a_group_is_added_to_an_optimizer_with_names() -> None:
    model, added = build_model(), nn.Linear(1, 3)
    plain = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = topkube.DistributedOptimizer(plain, model.named_parameters(), aggregation="dense")
    optimizer.add_param_group({"params": list(added.named_parameters("added")), "lr": 0.01})
    assert plain.param_groups[1]["param_names"] == ["added.weight", "added.bias"]
    before = added.weight.detach().clone()
    (added(torch.ones(1, 1)).sum() + model(torch.ones(1, 20)).sum()).backward()
    optimizer.step()
    torch.testing.assert_close(added.weight, before - 0.01)


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused() -> None:
    model = build_model()
    with pytest.raises(ArgumentError, match="LBFGS"):
        topkube.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), model.named_parameters())
    with pytest.raises(ArgumentError, match="already"):
        topkube.DistributedOptimizer(build_optimizer(model), model.named_parameters())


def test_dense_training_on_one_rank_equals_the_plain_optimizer_bit_for_bit() -> None:
    model, reference = build_model(), build_model()
    optimizer, plain = build_optimizer(model), torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        for network, each_optimizer in ((model, optimizer), (reference, plain)):
            run_backward(network, step)
            each_optimizer.step()
            each_optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_compression_on_one_rank_selects_and_keeps_the_rest() -> None:
    model = build_model()
    optimizer = build_optimizer(model, aggregation="hitopk", density=0.05, wire="fp32", warmup_steps=0)
    reference = copy.deepcopy(model)
    run_backward(reference)
    run_backward(model)
    optimizer.step()
    sent, whole = model[0].weight.grad, reference[0].weight.grad
    assert 0 < sent.count_nonzero() < 0.2 * sent.numel()
    [(start, kept)] = optimizer.state_dict()["topkube"]["residuals"]["pieces"]["0.weight"]
    assert start == 0
    assert torch.equal(sent.flatten() + kept, whole.flatten())
    assert torch.equal(model[0].bias.grad, reference[0].bias.grad), "small tensors go dense"


def test_a_step_of_an_optimizer_inside_the_wrapped_one_is_refused() -> None:
    model = build_model()
    wrapped = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    optimizer = topkube.DistributedOptimizer(wrapped, model.named_parameters(), aggregation="dense")
    run_backward(model)
    optimizer.first_step()
    run_backward(model)
    with pytest.raises(TrainingError, match=r"SGD, which is inside SAM.*make the DistributedOptimizer the optimizer"):
        optimizer.second_step()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.unwrap().second_step()
    combined = SAM(model.parameters(), lambda *_, **__: inner)
    combined.others = [other, combined]
    optimizer = topkube.DistributedOptimizer(combined, model.named_parameters(), aggregation="dense")
    other.step()  # it has other parameters
    with pytest.raises(TrainingError, match="is inside SAM"):
        inner.step()


def test_sam_around_a_distributed_optimizer_trains_as_sam_does() -> None:
    model, reference = build_model(), build_model()
    made = []

    def wrap(groups: list[dict], **options: float) -> topkube.DistributedOptimizer:
        plain = torch.optim.SGD(groups, **options)
        made.append(topkube.DistributedOptimizer(plain, model.named_parameters(), aggregation="dense"))
        return made[-1]

    optimizer = SAM(model.parameters(), wrap, lr=0.1, momentum=0.9)
    for network, sam in (
        (model, optimizer),
        (reference, SAM(reference.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)),
    ):
        for step in range(3):
            run_backward(network, step)
            sam.first_step()
            run_backward(network, step)
            sam.second_step()
    assert made[0].steps == 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_an_optimizer_without_the_constructor_of_torch_is_guarded_by_the_one_inside_it() -> None:
    model = build_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = topkube.DistributedOptimizer(Lookahead(plain), model.named_parameters(), aggregation="dense")
    run_backward(model)
    with pytest.raises(TrainingError, match="DistributedOptimizer"):
        plain.step()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert optimizer.steps == 1
    assert not torch.equal(before, model[0].weight)

    class Bare(torch.optim.Optimizer):
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            self.param_groups, self.state, self.defaults = [{"params": parameters}], {}, {}

    other = build_model()
    with pytest.raises(ArgumentError, match=r"Bare does not call.*super\(\).__init__"):
        topkube.DistributedOptimizer(Bare(list(other.parameters())), other.named_parameters(), aggregation="dense")


def test_schedulers_and_parameter_groups_work_on_a_distributed_optimizer() -> None:
    model = build_model()
    optimizer = build_optimizer(model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run_backward(model)
    optimizer.step()
    scheduler.step()
    assert optimizer.inner.param_groups[0]["lr"] == 0.05
    with pytest.raises(ArgumentError, match="no names"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_a_closure_is_evaluated_once() -> None:
    model = build_model()
    optimizer, calls = build_optimizer(model), []

    def closure() -> float:
        optimizer.zero_grad()
        run_backward(model)
        calls.append(1)
        return 2.5

    before = model[0].weight.detach().clone()
    assert optimizer.step(closure) == 2.5
    assert len(calls) == 1
    assert not torch.equal(before, model[0].weight)


def test_dropping_the_optimizer_ends_its_hooks() -> None:
    model = build_model()
    optimizer = build_optimizer(model, aggregation="hitopk", density=0.01)
    del optimizer
    run_backward(model)
    assert model[0].weight.grad.count_nonzero() > 0.5 * model[0].weight.numel()


def test_residuals_of_parameters_with_other_names_are_not_lost_in_silence() -> None:
    """A script that resumes without a wrapper of its model has names without "module."."""
    model = build_model()
    optimizer = build_optimizer(model, aggregation="hitopk", density=0.05, warmup_steps=0)
    run_backward(model)
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.unwrap()
    named = [(f"module.{name}", parameter) for name, parameter in model.named_parameters()]
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = topkube.DistributedOptimizer(plain, named, aggregation="hitopk")
    with pytest.warns(UserWarning, match=r"of 2 parameters .* such as 0\.weight: they are lost"):
        optimizer.load_state_dict(state)


def test_a_plain_optimizers_state_loads() -> None:
    model = build_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    run_backward(model)
    plain.step()
    optimizer = build_optimizer(model)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert optimizer.steps == 0


def train(directory: Path, steps: int, model: nn.Module, **settings: object) -> topkube.training.Run:
    optimizer = build_optimizer(model)
    data = list(torch.randn(6, 4, 20, generator=torch.Generator().manual_seed(0)))
    with topkube.checkpointing(model, optimizer, settings=Settings(**settings)) as run:  # type: ignore[arg-type]
        for x in run.progress(data, total=steps):
            run.loss(model(x).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run


def test_progress_is_written_step_by_step(tmp_path: Path) -> None:
    train(tmp_path, 9, build_model(), run_directory=str(tmp_path))
    records = [record for record, _ in read_records(tmp_path / "progress.jsonl")]
    assert [record.step for record in records] == list(range(1, 10))
    assert {record.total_steps for record in records} == {9}
    assert [record.epoch for record in records] == [0] * 6 + [1] * 3
    assert all(record.samples == 4 and record.loss is not None and record.loss > 0 for record in records)
    assert all({"data", "forward", "backward", "update"} <= record.seconds.keys() for record in records)


@pytest.mark.parametrize("keeps_loop", [False, True])
def test_a_script_that_breaks_off_leaves_its_last_record(tmp_path: Path, keeps_loop: bool) -> None:
    """Also if a variable keeps the iterator after the run."""
    model = build_model()
    optimizer = build_optimizer(model)
    with topkube.checkpointing(model, optimizer, settings=Settings(run_directory=str(tmp_path))) as run:
        batches = [run.progress(torch.randn(5, 4, 20))]
        for x in batches[0] if keeps_loop else batches.pop():
            run.loss(model(x).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.step == 2:  # the step of this batch is the third
                break
    assert [record.step for record, _ in read_records(tmp_path / "progress.jsonl")] == [1, 2, 3]
    assert run.step == 3
    for loop in batches:
        loop.close()


def test_a_plain_optimizer_cannot_be_checkpointed() -> None:
    model = build_model()
    with pytest.raises(TrainingError, match="DistributedOptimizer"):
        topkube.checkpointing(model, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]


def test_checkpoints_of_an_optimizer_with_its_own_world_are_refused(tmp_path: Path) -> None:
    """Its ranks would count the samples of a part of the ranks, and a resumed run would repeat data."""
    topkube.init()
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = topkube.DistributedOptimizer(sgd, model.named_parameters(), world=topkube.new_world([0]))
    with pytest.raises(TrainingError, match="own world="):
        topkube.checkpointing(model, optimizer, settings=Settings(checkpoint_directory=str(tmp_path)))
    topkube.checkpointing(model, optimizer, settings=Settings())


def test_without_a_directory_a_save_is_reported_once_and_training_continues(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = build_model()
    with topkube.checkpointing(model, build_optimizer(model), settings=Settings()) as run:
        run.save()
        run.save()
    assert capsys.readouterr().err.count("run.save() saved nothing") == 1


def test_passes_that_a_checkpoint_covers_are_skipped(tmp_path: Path) -> None:
    """This holds for the script's own loop over epochs too; the sampler continues in the middle of an epoch."""
    data = torch.utils.data.TensorDataset(torch.arange(200.0).view(10, 20))
    seen: list[tuple[int, int]] = []

    def train_until(stop: int) -> None:
        model = build_model()
        optimizer = build_optimizer(model)
        sampler = topkube.data.DistributedSampler(data, shuffle=False)
        loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
        settings = Settings(checkpoint_directory=str(tmp_path), checkpoint_every=1)
        with topkube.checkpointing(model, optimizer, sampler, settings=settings) as run:
            for _ in range(3):
                for (x,) in run.progress(loader):
                    seen.append((run.epoch, int(x[0, 0]) // 20))
                    model(x * 0.01).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if run.step + 1 == stop:
                        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        train_until(7)
    batches_before_stop = len(seen)
    assert batches_before_stop in (7, 8)
    train_until(100)
    assert seen == [(epoch, sample) for epoch in range(3) for sample in range(0, 10, 2)]


def test_a_loop_that_the_script_never_finishes_does_not_hang_the_process() -> None:
    script = """
import torch, topkube
topkube.init()
model = torch.nn.Linear(4, 4)
optimizer = topkube.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
run = topkube.checkpointing(model, optimizer).__enter__()
batches = run.progress([torch.ones(2, 4)] * 5)
model(next(batches)).sum().backward()
next(batches)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=280)


def test_an_optimizer_in_a_frozen_cycle_does_not_count() -> None:
    """Ranks that replay batches freeze their objects again, and other ranks do not. All must count the same
    optimizers."""
    topkube.init()
    model = nn.Linear(3, 1)
    optimizer = topkube.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    cycle: list[object] = [optimizer]
    cycle.append(cycle)
    frozen = weakref.ref(optimizer)
    gc.freeze()
    try:
        del optimizer, cycle
        other = nn.Linear(3, 1)
        second = topkube.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other.named_parameters())
        assert frozen() is None
        assert gc.get_freeze_count()
        del second
    finally:
        gc.unfreeze()
