"""A resume loads everything or nothing, and its error names the reason."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpointed_runs import build_training, claim_store, save_value, train
from torch import nn

import topkube
from topkube.errors import CheckpointError, TrainingError
from topkube.training.batches import generators as generators_module
from topkube.training.batches.generators import check_generators, read_generators, set_generators

Parameters = list[nn.Parameter]


def build_adam(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def build_adamw(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def build_plain_sgd(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def build_masters(parameters: Parameters) -> torch.optim.Optimizer:
    return topkube.training.MasterWeights(torch.optim.SGD(parameters, lr=0.1))


@pytest.mark.parametrize(
    ("first", "then", "was", "now"),
    [
        (build_adam, build_plain_sgd, "Adam", "SGD"),
        (build_adam, build_adamw, "Adam", "AdamW"),
        (build_plain_sgd, build_adam, "SGD", "Adam"),
        (build_masters, build_plain_sgd, "MasterWeights(SGD)", "SGD"),
    ],
)
def test_the_state_of_another_optimizer_is_refused_by_name(
    first: Any, then: Any, was: str, now: str, tmp_path: Path
) -> None:
    train(tmp_path, 2, make=first)
    pair = build_training(make=then)
    before = copy.deepcopy((pair[0].state_dict(), pair[1].inner.state_dict()))
    with pytest.raises(CheckpointError) as refused:
        train(tmp_path, 4, pair=pair)
    assert f"holds the state of {was}, this script trains with {now}." in str(refused.value)
    assert "['model']" in str(refused.value)
    assert_unchanged(pair, before)
    assert train(tmp_path, 4, make=first).step == 4


def assert_unchanged(pair: Any, before: Any) -> None:
    model, state = before
    assert all(torch.equal(value, model[name]) for name, value in pair[0].state_dict().items())
    after = pair[1].inner.state_dict()
    assert after["param_groups"] == state["param_groups"]
    assert str(after["state"]) == str(state["state"])


class Fussy:
    """An object of the script with a state. After `refuse` is set, its state cannot be loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "refuse" in self.__dict__:
            raise KeyError("b")


@pytest.mark.parametrize("problem", ["another width", "an object that does not load"])
def test_a_resume_that_fails_leaves_model_and_optimizer_as_they_were(problem: str, tmp_path: Path) -> None:
    train(tmp_path, 4, objects={"fussy": Fussy()})
    pair, fussy = build_training(width=32 if problem == "another width" else 64), Fussy()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(pair[1], 0.5)
    pair[0](torch.ones(1, 20)).sum().backward()
    pair[1].step()
    pair[1].zero_grad()
    if problem != "another width":
        fussy.__dict__["refuse"] = True
    before = copy.deepcopy((pair[0].state_dict(), pair[1].inner.state_dict()))
    with pytest.raises(CheckpointError, match=r"belongs to another model or optimizer: (Fussy|Sequential)"):
        train(tmp_path, 8, pair=pair, objects={"fussy": fussy, "scheduler": scheduler})
    assert_unchanged(pair, before)


def test_an_object_without_a_state_in_the_checkpoint_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, 2)
    train(tmp_path, 4, objects={"fussy": Fussy()})
    assert "contains no state of fussy, which starts from the beginning" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("foreign", "reason"),
    [
        ({}, "holds no 'step'"),
        ({"step": "two"}, "holds a str as 'step'"),
        ({"optimizer": {"state": {}}}, "holds no state of a DistributedOptimizer"),
        ({"own": {"residuals": {"pieces": 1}}}, "holds residuals without copy"),
        ({"own": {"generators": {"torch": 1}}}, "not those of generators"),
    ],
)
def test_after_a_foreign_file_with_a_valid_checksum_the_checkpoint_before_is_loaded(
    foreign: dict[str, Any], reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, 2)
    whole = {"step": 9, "epoch": 0, "model": {}, "optimizer": {"topkube": {}}, "sampler": None, "more": {}}
    own = {
        "residuals": {"copy": 0, "copies": 1, "pieces": {}},
        "generators": read_generators(),
        **foreign.get("own", {}),
    }
    foreign = {name: value for name, value in foreign.items() if name != "own"}
    shared = {**whole, **foreign} if foreign or "residuals" in reason or "generators" in reason else {}
    claim_store(tmp_path, keep=9).save(9, lambda: shared, own)
    assert train(tmp_path, 4).step == 4
    output = capfd.readouterr()
    assert "resumed at step 2" in output.out
    assert reason in output.err
    assert "going back to the previous checkpoint" in output.err


def test_a_checkpoint_of_format_1_is_resumed(tmp_path: Path) -> None:
    """Format 1 has plain values, no number of copies in the manifest and no name of the optimizer."""
    import json

    import xxhash

    train(tmp_path, 2)
    folder = tmp_path / "step-00000002.run-00001"
    shared = torch.load(folder / "shared.pt", weights_only=True)
    del shared["optimizer_names"]
    torch.save(shared, folder / "shared.pt")
    manifest = json.loads((folder / "checkpoint.json").read_text())
    data = (folder / "shared.pt").read_bytes()
    manifest["files"]["shared.pt"] = {"bytes": len(data), "xxh3": f"{xxhash.xxh3_64_intdigest(data):016x}"}
    del manifest["residual_copies"]
    (folder / "checkpoint.json").write_text(json.dumps({**manifest, "format": 1}))
    assert train(tmp_path, 2).step == 2


# Random generators


class Gpus:
    """A fake torch.cuda of `count` GPUs, each with its own generator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0, started: bool = True) -> None:
        self.generators = [torch.Generator().manual_seed(10 * gpu) for gpu in range(count)]
        fakes = {
            "is_available": lambda: True,
            "is_initialized": lambda: started,
            "device_count": lambda: count,
            "current_device": lambda: current,
            "get_rng_state": lambda gpu: self.generators[gpu].get_state(),
            "set_rng_state": lambda state, gpu: self.generators[gpu].set_state(state),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(generators_module.torch.cuda, name, fake)

    def draw(self) -> list[float]:
        return [float(torch.rand((), generator=generator)) for generator in self.generators]


def test_generators_of_gpus_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, 2)
    gpus.draw()
    states = read_generators()
    check_generators(states)
    expected = gpus.draw()
    assert gpus.draw() != expected
    set_generators(states)
    assert gpus.draw() == expected


def test_with_other_gpus_the_generator_of_the_current_gpu_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Gpus(monkeypatch, 2, current=1)
    states = read_generators()
    expected = before.draw()[1]
    after = Gpus(monkeypatch, 1)
    after.draw()
    set_generators(states)
    assert after.draw() == [expected]


def test_a_script_without_gpus_starts_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 1, started=False)
    assert "cuda" not in read_generators()


def test_a_run_on_gpus_continues_with_the_same_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, 2)
    drawn: list[float] = []

    class Drawing:
        """Draws after every batch, as dropout on a GPU does."""

        def __iter__(self) -> Any:
            for x in torch.ones(6, 4, 20):
                drawn.append(gpus.draw()[0])
                yield x

    def run(steps: int) -> None:
        model, optimizer = build_training()
        settings = topkube.settings.Settings(checkpoint_directory=str(tmp_path), checkpoint_every=100)
        with topkube.checkpointing(model, optimizer, settings=settings) as training_run:
            for x in training_run.progress(Drawing(), total=steps):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    run(3)
    gpus.draw()
    run(5)
    first = torch.Generator().manual_seed(0)
    assert drawn == [float(torch.rand((), generator=first)) for _ in range(5)]


def test_checking_generators_changes_none() -> None:
    states = read_generators()
    before = torch.rand(1), np.random.rand()  # noqa: NPY002
    set_generators(states)
    check_generators(read_generators())
    assert (torch.rand(1), np.random.rand()) == before  # noqa: NPY002
    with pytest.raises(Exception, match="state"):
        check_generators({**states, "torch": torch.zeros(3, dtype=torch.uint8)})


def test_a_later_checkpoint_of_another_script_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    claim = claim_store(tmp_path)
    save_value(claim, 3)
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints .* can be read"):
        train(tmp_path, 2)


class EpochRun:
    """Runs of four epochs of eight batches with one sample each, in one directory. `seen` has the samples of every
    update of all runs, and `run` is the last one. Every run begins with new objects."""

    def __init__(self, directory: Path, every: int = 3) -> None:
        self.settings = topkube.settings.Settings(checkpoint_directory=str(directory), checkpoint_every=every)
        self.seen: list[float] = []
        self.run: Any = None

    def train(
        self, epochs: Any = range(4), updates: int = 1000, sets_epoch: bool = False, leave: Any = None, each: Any = None
    ) -> None:
        """Train over `epochs`. After `updates` updates in all runs, raise KeyboardInterrupt, or leave the loop if
        `leave` is "break". `each` is called with the run after each update."""
        model, optimizer = build_training()
        data = torch.utils.data.TensorDataset(torch.arange(8.0)[:, None].expand(8, 20))
        sampler = topkube.data.DistributedSampler(data)
        loader = torch.utils.data.DataLoader(data, batch_size=1, sampler=sampler)
        with topkube.checkpointing(model, optimizer, sampler, settings=self.settings) as self.run:
            for epoch in epochs(self.run) if callable(epochs) else epochs:
                if sets_epoch:
                    sampler.set_epoch(epoch)
                for (x,) in self.run.progress(loader):
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    self.seen.append(x[0, 0].item())
                    if each is not None:
                        each(self.run)
                    if len(self.seen) >= updates:
                        if leave == "break":
                            return
                        raise KeyboardInterrupt


@pytest.mark.parametrize("sets_epoch", [False, True])
def test_a_script_that_sets_the_epoch_resumes_within_it(sets_epoch: bool, tmp_path: Path) -> None:
    runs = EpochRun(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        runs.train(updates=22, sets_epoch=sets_epoch)
    del runs.seen[18:]  # the newest checkpoint is of step 18: two batches of the third epoch
    runs.train(sets_epoch=sets_epoch)
    assert runs.run.step == 32
    for epoch in range(4):
        assert sorted(runs.seen[8 * epoch : 8 * epoch + 8]) == list(range(8)), "every sample once per epoch"


def test_a_loop_that_begins_with_the_epoch_of_the_run_is_refused(tmp_path: Path) -> None:
    runs = EpochRun(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        runs.train(updates=22)
    with pytest.raises(TrainingError, match=r"resumed in epoch 2, but the script asked for 2 passes.*run.epochs"):
        runs.train(epochs=lambda run: range(run.epoch, 4))
    runs.train()
    assert runs.run.step == 32
    runs.train()  # nothing is left to do


@pytest.mark.parametrize("every", [3, 4, 100])
def test_an_update_before_a_break_counts(every: int, tmp_path: Path) -> None:
    runs = EpochRun(tmp_path, every)
    runs.train(updates=4, leave="break")
    assert runs.run.step == 4
    runs.train(epochs=range(1))
    assert (runs.run.step, sorted(runs.seen)) == (8, list(range(8)))


@pytest.mark.parametrize("every", [3, 4, 100])
def test_a_save_after_an_update_contains_it(every: int, tmp_path: Path) -> None:
    runs, steps = EpochRun(tmp_path, every), list[int]()

    def save(run: Any) -> None:
        if len(runs.seen) in (4, 5):
            run.save()
            steps.append(run.step)

    with pytest.raises(KeyboardInterrupt):
        runs.train(updates=5, each=save)
    assert steps == [4, 5]
    runs.train(epochs=range(1))
    assert (runs.run.step, sorted(runs.seen)) == (8, list(range(8)))


def test_a_validation_inside_an_epoch_leaves_the_batch_as_it_was(tmp_path: Path) -> None:
    runs = EpochRun(tmp_path)
    positions = []

    def validate(run: Any) -> None:
        for _ in run._optimizer.join([torch.ones(3, 20)] * 2):
            pass
        positions.append(run._sampler.position)
        assert run._optimizer.turns.samples == 1

    runs.train(epochs=range(1), each=validate)
    assert positions == list(range(8)), "each batch has one sample"
