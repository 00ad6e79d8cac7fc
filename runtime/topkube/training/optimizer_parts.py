"""The parts of a DistributedOptimizer, built for a torch optimizer and the job's aggregation settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from topkube.algorithms import AUTO, NODE_WEIGHTS, Algorithm
from topkube.errors import ArgumentError
from topkube.settings import Settings
from topkube.training.exchange.aggregation import AggregationSettings
from topkube.training.exchange.autograd.loss_scale import watch_scalers
from topkube.training.exchange.backward import Backward
from topkube.training.exchange.buckets.parameter import Parameter, is_sharded
from topkube.training.exchange.late.late_updates import LateUpdates, check_optimizer
from topkube.training.exchange.tuning.saved_choice import find_saved_algorithm
from topkube.training.node_weights.agreed_weights_check import AgreedWeightsCheck
from topkube.training.node_weights.gradient_noise import NoiseCorrection
from topkube.training.node_weights.node_weights import NodeWeights
from topkube.training.node_weights.requirements import check_parameters
from topkube.training.node_weights.second_moment import SecondMoment
from topkube.training.node_weights.trained_weights import TrainedWeights
from topkube.training.node_weights.worlds import find_node_world
from topkube.training.optimizers.layerwise import LayerwiseNoise, LayerwiseOptimizer, NoisyGradients
from topkube.training.optimizers.mixed_precision import MasterWeights
from topkube.training.optimizers.momentum import MomentumCorrection
from topkube.training.optimizers.parameters import name_parameters
from topkube.training.optimizers.step_guard import StepGuard
from topkube.training.optimizers.wrapper import OptimizerWrapper
from topkube.training.reporting.step_trace import start_trace
from topkube.training.reporting.warning import warn
from topkube.world import World


@dataclass(frozen=True)
class OptimizerParts:
    """The parts around the torch optimizer `inner`: the exchange of gradients during backward (`backward`), the
    refusal of steps that the script makes on `inner` (`guard`), and, if the settings ask for them, error feedback in
    the weights, momentum correction, and updates during the next forward."""

    inner: torch.optim.Optimizer
    job: AggregationSettings
    """The settings of the job."""
    aggregation: AggregationSettings
    """The settings in force: those of the job, or with `onebit` in place of `auto`."""
    backward: Backward
    guard: StepGuard
    node_weights: NodeWeights | None
    correction: MomentumCorrection | None
    late: LateUpdates | None


def build_parts(
    optimizer: torch.optim.Optimizer,
    names: list[tuple[str, torch.nn.Parameter]],
    aggregation: AggregationSettings,
    settings: Settings,
    world: World,
    is_copy: bool,
) -> OptimizerParts:
    """Return the parts for `optimizer`, whose parameters have `names`. A copy (`is_copy`) counts among the optimizers
    of the process only when it trains. Raises ArgumentError for an optimizer or a model that the settings do not
    support."""
    if aggregation.node_weights != NODE_WEIGHTS.default:
        aggregation = _check_permission(optimizer, names, aggregation, world)
    return _build_parts(optimizer, names, aggregation, aggregation, settings, world, is_copy)


def follow_choice(parts: OptimizerParts, settings: Settings) -> OptimizerParts:
    """Return the parts for what `auto` stands for after a step. They are new if the nodes get weights of their own,
    after a step that sent all residuals, or equal weights again; the nodes' weights are then averaged. All ranks call
    this together."""
    tuning, exchange = parts.backward.plan.tuning, parts.backward.exchange
    if tuning.is_sending_residuals and not exchange.algorithms.uses_residuals:
        tuning.end_residuals()
        if any(values.any() for values in exchange.residuals.list_arrays()):
            warn(
                f"auto is {tuning.choice} now, and rank {parts.backward.world.rank} drops the parts of gradients that"
                " parameters which are frozen now had not sent. They are lost if you train these parameters again."
                " Next: freeze parameters before the first step, or set an algorithm in place of auto."
            )
    choice = tuning.choice
    if choice is None or choice.algorithm.in_weights == parts.aggregation.in_weights:
        return parts
    if parts.node_weights is not None:
        parts.node_weights.average()
    return _build_again(parts, choice.algorithm if choice.algorithm.in_weights else None, settings)


def follow_state(parts: OptimizerParts, exchange_state: Mapping[str, Any], settings: Settings) -> OptimizerParts:
    """Return the parts for what `auto` stood for in a saved state, before the state is loaded. What the nodes have not
    sent is lost, because the state replaces it."""
    saved = find_saved_algorithm(exchange_state.get("choice"))
    is_allowed = saved is not None and saved in parts.job.compressed_choices and saved.in_weights
    algorithm = saved if is_allowed else None
    if parts.job.algorithm != AUTO or (algorithm is not None) == parts.aggregation.in_weights:
        return parts
    return _build_again(parts, algorithm, settings)


def _build_again(parts: OptimizerParts, algorithm: Algorithm | None, settings: Settings) -> OptimizerParts:
    """Return new parts that go on with the counters of `parts`: with `algorithm` in place of `auto`, or, if it is None,
    with the algorithms that exchange gradients."""
    earlier = parts.backward
    earlier.end()
    parts.guard.remove()
    names: list[tuple[str, Any]] = [(p.name, p.tensor) for p in earlier.parameters]
    aggregation = parts.job if algorithm is None else parts.job.replace_auto(algorithm)
    return _build_parts(parts.inner, names, parts.job, aggregation, settings, earlier.world, False, earlier=earlier)


def _check_permission(
    optimizer: torch.optim.Optimizer,
    names: list[tuple[str, torch.nn.Parameter]],
    aggregation: AggregationSettings,
    world: World,
) -> AggregationSettings:
    """Return the settings without `node_weights: own`, with a warning, if the optimizer or the model does not support
    it. Otherwise create the world of the node. All ranks call this together."""
    own = next(algorithm for algorithm in aggregation.compressed_choices if algorithm.in_weights)
    parameters = name_parameters(optimizer, names, sharded=True)
    problem = ""
    try:
        check_parameters(TrainedWeights(parameters, find_masters(optimizer)), own.name)
    except ArgumentError as error:
        problem = error.what
    if not problem:
        find_node_world(world)
        return aggregation
    if world.rank == 0:
        warn(f"auto will not take {own.name}, which node_weights allows: {problem}")
    return replace(aggregation, node_weights=NODE_WEIGHTS.default)


def _build_parts(
    optimizer: torch.optim.Optimizer,
    names: list[tuple[str, torch.nn.Parameter]],
    job: AggregationSettings,
    aggregation: AggregationSettings,
    settings: Settings,
    world: World,
    is_copy: bool,
    earlier: Backward | None = None,
) -> OptimizerParts:
    """Return the parts for the settings in force, `aggregation`. `job` holds the settings of the job. The counters of
    the exchange `earlier` continue, if it is passed."""
    guard = StepGuard(optimizer)
    correction = MomentumCorrection(optimizer) if aggregation.momentum_correction else None
    momentum = correction.read_momentum if correction else lambda: (0.0, 1.0)
    parameters = name_parameters(optimizer, names, sharded=True)
    node_weights = node_world = check = None
    if aggregation.in_weights:
        noise_correction = _build_noise_correction(optimizer, world)
        masters = find_masters(optimizer)
        node_weights = NodeWeights(world, parameters, aggregation, optimizer, masters, noise_correction)
        node_world = node_weights.node_world
        mode, every = settings.check_weights, settings.check_weights_every
        trained = node_weights.trained.parameters
        check = AgreedWeightsCheck(node_weights.exchange, node_world, trained, optimizer, mode, every)
    share_norms(optimizer, node_world or world)
    backward = Backward(world, parameters, aggregation, momentum, settings, is_copy, node_world, check, earlier)
    if not is_copy and earlier is None:
        tensors: list[tuple[str, torch.Tensor]] = [(p.name, p.tensor) for p in parameters]
        backward.queue.step_trace = start_trace(world, tensors, aggregation, settings)
    if node_weights is None and correction is None and not aggregation.schedule:
        backward.gradients.decisions.watch(optimizer)
    backward.late = _build_late_updates(optimizer, aggregation, backward, guard, parameters)
    watch_scalers()
    return OptimizerParts(optimizer, job, aggregation, backward, guard, node_weights, correction, backward.late)


def _build_late_updates(
    optimizer: torch.optim.Optimizer,
    aggregation: AggregationSettings,
    backward: Backward,
    guard: StepGuard,
    parameters: list[Parameter],
) -> LateUpdates | None:
    """Return the updates during the next forward; None if step() updates the parameters. Raises ArgumentError."""
    if not aggregation.is_decoupled:
        return None
    if backward.exchange.on_device is not None or any(is_sharded(p.tensor) for p in parameters):
        raise ArgumentError(
            "the overlap dear needs whole parameters in host memory",
            cause="the model is on a GPU, or sharded",
            next_step="leave overlap at backward",
        )
    check_optimizer(optimizer)
    if backward.exchange.reduced_parts is None:  # one node has no exchange between nodes
        return None
    return LateUpdates(backward.exchange.reduced_parts, optimizer, guard.allow_step)


def find_masters(optimizer: torch.optim.Optimizer) -> MasterWeights | None:
    """Return the wrapper that keeps master weights, if there is one."""
    while isinstance(optimizer, OptimizerWrapper):
        if isinstance(optimizer, MasterWeights):
            return optimizer
        optimizer = optimizer.inner
    return None


def share_norms(optimizer: torch.optim.Optimizer, world: World | None) -> None:
    """Have the innermost optimizer share the norms of its layers among the ranks of `world`, if it shares them: other
    ranks may have another model. None stands for all ranks."""
    innermost = _find_innermost(optimizer)
    if isinstance(innermost, LayerwiseOptimizer):
        innermost.noise = NoisyGradients(ranks=world)


def _find_innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    while isinstance(optimizer, OptimizerWrapper):
        optimizer = optimizer.inner
    return optimizer


def _build_noise_correction(optimizer: torch.optim.Optimizer, world: World) -> NoiseCorrection | None:
    """Return the correction of the innermost optimizer's steps for the noise of a node's gradient, None if they have
    none."""
    optimizer = _find_innermost(optimizer)
    if isinstance(optimizer, LayerwiseOptimizer):
        return LayerwiseNoise(optimizer, world.nodes, find_node_world(world))
    return SecondMoment(optimizer) if SecondMoment.supports(optimizer) else None
