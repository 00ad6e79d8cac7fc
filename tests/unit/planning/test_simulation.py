"""The simulation of a step: properties that hold for every model and cluster."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topkube.algorithms import DELAY, OWN, Algorithm, Machines, count_times_fewer_bytes, estimate_cost, find_algorithm
from topkube.planning import guidelines
from topkube.planning.buckets import plan_bucket_lengths
from topkube.planning.models import find_model
from topkube.planning.profile import Gradient, HostCost, StepProfile, build_uniform_profile
from topkube.planning.simulation import COMMUNICATION, COMPUTE, INPUT, LATENCY, LINK, PROCESSOR_LANES, Task, simulate
from topkube.planning.situation import Situation
from topkube.planning.step import Prediction, estimate_slowest, predict_step

seconds = st.floats(1e-5, 0.5)


@st.composite
def profiles(draw: st.DrawFn) -> StepProfile:
    gradients = tuple(
        Gradient(str(number), draw(st.integers(1, 5_000_000)), draw(seconds), is_always_dense=draw(st.booleans()))
        for number in range(draw(st.integers(1, 12)))
    )
    host = {}
    if draw(st.booleans()):
        host = {algorithm.name: HostCost(2, 2, 1e-4, draw(st.floats(0, 1e-8)), 0.7) for algorithm in OWN}
    return StepProfile(
        "drawn",
        forward=draw(seconds),
        gradients=gradients,
        update=draw(seconds),
        other=draw(seconds),
        spread=draw(st.sampled_from([0.0, 0.05])),
        host=host,
        on_cpu=draw(st.booleans()),
    )


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    machines = Machines(
        draw(st.sampled_from([1, 2, 3, 16, 17, 4096])),
        draw(st.integers(1, 8)),
        link=draw(st.floats(1e6, 1e11)),
        memory=draw(st.floats(1e9, 1e12)),
        latency=draw(st.floats(0, 1e-3)),
    )
    return Situation(machines, density=draw(st.floats(0.0001, 1)), cores=draw(st.sampled_from([1, 2, 16, math.inf])))


algorithms = st.sampled_from(OWN)


@settings(deadline=None)
@given(profiles(), situations(), algorithms)
def test_a_step_is_never_faster_than_its_parts(
    profile: StepProfile, situation: Situation, algorithm: Algorithm
) -> None:
    prediction = predict_step(profile, situation, algorithm)
    least = max(prediction.compute + profile.update + profile.other, prediction.wire)
    assert prediction.step >= least * (1 - 1e-9)
    assert 0 < prediction.efficiency <= 1 + 1e-9
    processor = sum(task.seconds for task in prediction.tasks if task.lane not in (LINK, LATENCY, INPUT))
    assert prediction.step >= processor / max(situation.cores / situation.machines.slots, 3) * (1 - 1e-9)


@settings(deadline=None)
@given(profiles(), situations(), algorithms, st.floats(1, 1000))
def test_a_faster_link_is_never_slower(
    profile: StepProfile, situation: Situation, algorithm: Algorithm, factor: float
) -> None:
    situation = dataclasses.replace(situation, cores=math.inf)
    profile = dataclasses.replace(profile, bucket_bytes=1 << 22)  # otherwise buckets change with the link
    faster = guidelines.change_link(situation, situation.machines.link * factor)
    assert predict_step(profile, faster, algorithm).step <= predict_step(profile, situation, algorithm).step * (
        1 + 1e-9
    )


@settings(deadline=None)
@given(profiles(), situations(), algorithms)
def test_without_overlap_a_step_is_the_sum_of_its_parts(
    profile: StepProfile, situation: Situation, algorithm: Algorithm
) -> None:
    situation = dataclasses.replace(situation, cores=math.inf, overlap=False)
    prediction = predict_step(profile, situation, algorithm)
    assert prediction.step == pytest.approx(sum(task.seconds for task in prediction.tasks))


@settings(deadline=None)
@given(st.integers(1 << 16, 10**6), seconds, situations().filter(lambda situation: situation.machines.nodes > 1))
def test_a_step_of_one_bucket_follows_the_closed_formula(elements: int, time: float, situation: Situation) -> None:
    """Nothing hides the exchange of a single bucket: it follows backward, as in the cost model."""
    situation = dataclasses.replace(situation, cores=math.inf)
    profile = StepProfile("one", time, (Gradient("weight", elements, 2 * time),), update=time, on_cpu=True)
    agreement = 2 * math.ceil(math.log2(situation.ranks)) * situation.machines.latency
    exchange = estimate_cost(
        find_algorithm("hitopk"), situation.machines, elements, situation.density, situation.wire
    ).seconds
    assert predict_step(profile, situation, find_algorithm("hitopk")).step == pytest.approx(
        4 * time + exchange + agreement
    )


@given(profiles(), algorithms)
def test_one_rank_alone_exchanges_nothing(profile: StepProfile, algorithm: Algorithm) -> None:
    alone = predict_step(profile, Situation(Machines(1, 1, 1e9, 1e10)), algorithm)
    assert alone.step == pytest.approx(profile.serial)
    assert alone.efficiency == pytest.approx(1)


HIERARCHICAL = find_algorithm("hierarchical")
LINK_RATE, LATENCY_SECONDS, AGREEMENT = 1e9, 1e-4, 2e-4


def build_layers_profile(count: int, forward: float, backward: float) -> StepProfile:
    """Return the profile of equal layers of 4 MB, each a bucket: its exchange sends 4 ms on the link below."""
    gradients = tuple(Gradient(str(number), 1_000_000, backward / count) for number in range(count))
    return StepProfile("layers", forward, gradients, on_cpu=True, bucket_bytes=4_000_000)


def predict_both(profile: StepProfile) -> tuple[float, float]:
    """Return the seconds of a step on two nodes without DeAR and with it. Work in memory takes no time."""
    machines = Machines(2, 1, LINK_RATE, math.inf, LATENCY_SECONDS)
    steps = (Situation(machines, is_decoupled=dear) for dear in (False, True))
    plain, dear = (predict_step(profile, situation, HIERARCHICAL).step for situation in steps)
    return plain, dear


def test_dear_with_a_single_layer_hides_only_waits() -> None:
    """The layer travels in two pieces: the first is gathered while the second waits for its last message."""
    profile = dataclasses.replace(build_layers_profile(1, forward=0.1, backward=0.2), update=0.01)
    plain, dear = predict_both(profile)
    assert plain == pytest.approx(0.31 + 0.004 + 2 * LATENCY_SECONDS + AGREEMENT)
    assert dear == pytest.approx(0.31 + 0.004 + LATENCY_SECONDS)


def test_dear_hides_the_exchange_of_all_layers_but_the_last() -> None:
    """Computation is slower than the link. The reduce-scatter of the last bucket follows backward, and forward needs
    its gather first, unless the rest of the loop hides it."""
    profile = build_layers_profile(10, forward=0.1, backward=0.2)
    plain, dear = predict_both(profile)
    assert plain == pytest.approx(0.3 + 0.004 + 2 * LATENCY_SECONDS + AGREEMENT)
    assert dear == pytest.approx(0.3 + 0.004 + LATENCY_SECONDS)
    with_rest = predict_both(dataclasses.replace(profile, other=0.005))[1]
    assert with_rest == pytest.approx(0.305 + 0.002 + LATENCY_SECONDS + AGREEMENT)


def test_with_dear_the_link_works_without_a_break() -> None:
    """The link needs 40 ms. Without DeAR, the link is idle during forward and until the first gradient is there. With
    DeAR, it is idle only from the last gather to the first gradient, while the last layer of forward and the first
    layer of backward are computed. If backward takes longer, the reduce-scatters leave gaps on the link, and gathers
    fill these gaps."""
    plain, dear = predict_both(build_layers_profile(10, forward=0.01, backward=0.01))
    assert plain == pytest.approx(0.01 + 0.001 + 0.04 + 2 * LATENCY_SECONDS + AGREEMENT)
    assert 0.001 + 0.04 <= dear <= 0.002 + 0.04 + 2 * LATENCY_SECONDS + 0.001
    plain, dear = predict_both(build_layers_profile(10, forward=0.01, backward=0.04))
    assert plain == pytest.approx(0.05 + 0.004 + 2 * LATENCY_SECONDS + AGREEMENT)
    assert dear <= 0.05 + 0.004 + 2 * LATENCY_SECONDS + AGREEMENT


def test_dear_waits_for_the_buckets_of_the_first_layers_only() -> None:
    """Backward is too short to hide a gather. If the last layer takes all the time of forward, forward hides no gather
    either, because the bucket of the last layer is gathered last. If the first layer takes all the time, forward hides
    all gathers but the first."""
    late, early = (
        dataclasses.replace(
            build_layers_profile(10, forward=0.1, backward=0.0),
            gradients=tuple(
                dataclasses.replace(gradient, forward=0.1 if number == slow else 0.0)
                for number, gradient in enumerate(build_layers_profile(10, 0.1, 0.0).gradients)
            ),
        )
        for slow in (0, 9)
    )
    whole = 0.1 + 0.04 + 2 * LATENCY_SECONDS
    assert predict_both(late)[1] == pytest.approx(whole, abs=LATENCY_SECONDS)
    assert predict_both(early)[1] == pytest.approx(whole - 9 * 0.002, abs=0.001)


@pytest.mark.parametrize(
    "change", [{"on_cpu": False}, {"nodes": 1}, {"overlap": False}, {"algorithm": "oktopk"}, {"algorithm": "flat"}]
)
def test_dear_changes_nothing_if_the_runtime_does_not_use_it(change: dict[str, object]) -> None:
    profile = dataclasses.replace(build_layers_profile(10, 0.02, 0.02), on_cpu=bool(change.get("on_cpu", True)))
    machines = Machines(int(str(change.get("nodes", 2))), 1, LINK_RATE, math.inf, LATENCY_SECONDS)
    overlap, algorithm = bool(change.get("overlap", True)), find_algorithm(str(change.get("algorithm", "hierarchical")))
    plain, dear = (Situation(machines, overlap=overlap, is_decoupled=dear) for dear in (False, True))
    assert predict_step(profile, dear, algorithm).step == predict_step(profile, plain, algorithm).step


@pytest.mark.parametrize(("name", "share"), [("hitopk", 0.0), ("int4", 0.5)])
def test_dear_hides_the_messages_of_algorithms_that_compress(name: str, share: float) -> None:
    """Ten layers in one bucket, whose work takes no time: with hitopk, all messages come after the first half."""
    algorithm, profile = find_algorithm(name), build_layers_profile(10, forward=1.0, backward=1.0)
    machines = Machines(2, 1, LINK_RATE / 100, math.inf, LATENCY_SECONDS)
    plain, dear = (
        predict_step(profile, Situation(machines, is_decoupled=is_decoupled), algorithm)
        for is_decoupled in (False, True)
    )
    first_halves = sum(task.seconds for task in dear.tasks if task.lane == LINK and "gather" not in task.name)
    assert dear.wire == pytest.approx(plain.wire)
    assert first_halves == pytest.approx(share * plain.wire)
    assert dear.step < plain.step


@settings(deadline=None)
@given(profiles(), situations())
def test_dear_does_the_same_work_and_is_not_slower(profile: StepProfile, situation: Situation) -> None:
    """Forward can hide the gathers too. A piece of a gather can delay a reduce-scatter, and the step may become longer
    by this piece."""
    situation = dataclasses.replace(situation, cores=math.inf)
    plain = predict_step(profile, situation, HIERARCHICAL)
    dear = predict_step(profile, dataclasses.replace(situation, is_decoupled=True), HIERARCHICAL)

    def sum_work(prediction: Prediction, *lanes: str) -> float:
        return sum(task.seconds for task in prediction.tasks if task.lane in lanes)

    assert dear.wire == pytest.approx(plain.wire)
    assert sum_work(dear, *PROCESSOR_LANES) == pytest.approx(sum_work(plain, *PROCESSOR_LANES))
    assert dear.step >= max(dear.compute + profile.update + profile.other, dear.wire) * (1 - 1e-9)
    piece = max((task.seconds for task in dear.tasks if "gather of" in task.name), default=0.0)
    assert dear.step <= (plain.step + 4 * piece) * (1 + 1e-9)  # a piece has four tasks


DELAYED = [algorithm for algorithm in OWN if DELAY in algorithm.parameters]
ONEBIT = find_algorithm("onebit")


def predict_onebit(link: float, period: int = 1, delay: int = 1) -> float:
    """Return the seconds of a step on two nodes. Its exchange sends 132,814 bytes. Work in memory takes no time."""
    profile = dataclasses.replace(build_layers_profile(1, forward=0.1, backward=0.2), update=0.01)
    machines = Machines(2, 1, link, math.inf, LATENCY_SECONDS)
    return predict_step(profile, Situation(machines, period=period, delay=delay), ONEBIT).step


def test_a_delayed_exchange_costs_what_the_next_step_does_not_hide() -> None:
    fast, slow = 1e6, 2e5
    alone = 0.3 + AGREEMENT + 0.01
    assert predict_onebit(fast, delay=0) == pytest.approx(alone + 0.132814 + LATENCY_SECONDS)
    assert predict_onebit(fast) == pytest.approx(alone)
    late = 5 * 0.132814 + LATENCY_SECONDS + 0.01
    assert predict_onebit(slow) == pytest.approx(late)
    assert predict_onebit(slow, period=4) == pytest.approx((late + 3 * alone) / 4)


@settings(deadline=None)
@given(profiles(), situations(), st.sampled_from(DELAYED), st.sampled_from([None, 2, 5]))
def test_a_delay_never_costs_time(
    profile: StepProfile, situation: Situation, algorithm: Algorithm, period: int | None
) -> None:
    def predict(situation: Situation) -> tuple[Prediction, Prediction]:
        situations = (dataclasses.replace(situation, period=period, delay=delay) for delay in (0, 1))
        plain, delayed = (predict_step(profile, situation, algorithm) for situation in situations)
        return plain, delayed

    plain, delayed = predict(situation)
    assert delayed.wire == pytest.approx(plain.wire)
    assert delayed.step <= plain.step * (1 + 1e-9)
    assert delayed.step >= max(delayed.compute + profile.update + profile.other, delayed.wire) * (1 - 1e-9)
    profile = dataclasses.replace(profile, host={})
    instant = dataclasses.replace(situation.machines, link=math.inf, memory=math.inf, latency=0.0)
    plain, delayed = predict(dataclasses.replace(situation, machines=instant))
    assert delayed.step == pytest.approx(plain.step)


@pytest.mark.parametrize("change", [{"nodes": 1}, {"overlap": False}, {"algorithm": "hitopk"}])
def test_a_delay_changes_nothing_if_the_runtime_does_not_use_it(change: dict[str, object]) -> None:
    machines = Machines(int(str(change.get("nodes", 2))), 2, 1e6, 1e10, LATENCY_SECONDS)
    overlap, algorithm = bool(change.get("overlap", True)), find_algorithm(str(change.get("algorithm", "onebit")))
    plain, delayed = (Situation(machines, overlap=overlap, delay=delay) for delay in (0, 1))
    profile = build_layers_profile(10, 0.02, 0.02)
    assert predict_step(profile, delayed, algorithm).step == predict_step(profile, plain, algorithm).step


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("nodes", [2, 4, 16])
@pytest.mark.parametrize(("name", "wire"), [("localsgd", "bf16"), ("diloco", "fp32"), ("onebit", "bf16")])
def test_weights_of_small_tensors_travel_once_in_a_period(name: str, wire: str, nodes: int, delay: int) -> None:
    """They travel in the stages of the other weights: in the format of localsgd and diloco, or as bf16."""
    algorithm, link, small, large = find_algorithm(name), 1e6, 512, 1 << 20
    gradients = (*(Gradient(f"norm {number}", small, 1e-5) for number in range(100)), Gradient("weight", large, 1e-3))
    situation = Situation(Machines(nodes, 1, link, 50e9, 0.0), wire=wire, period=100, delay=delay)
    sent = predict_step(StepProfile("model", 1e-3, gradients), situation, algorithm).wire * link
    if name == "onebit":
        as_bf16 = (nodes - 1 if nodes < 8 else 2 * (nodes - 1) / nodes) * 2 * 100 * small / 100
        expected = algorithm.traffic(situation.build_workload(algorithm, large)).sent + as_bf16
    else:
        expected = algorithm.traffic(situation.build_workload(algorithm, large + 100 * small)).sent
    assert sent == pytest.approx(expected)


def test_threads_share_cores() -> None:
    def build_tasks() -> list[Task]:
        return [Task("a", COMPUTE, 1.0), Task("b", COMMUNICATION, 0.5), Task("c", LINK, 1.8)]

    assert simulate(build_tasks(), cores=2) == pytest.approx(1.8)
    alone = build_tasks()[:2]
    assert simulate(alone, cores=1) == pytest.approx(1.5)
    assert [task.end for task in alone] == pytest.approx([1.5, 1.0])
    slow = build_tasks()[:2]
    assert simulate(slow, cores=0.5) == pytest.approx(3.0)


def test_the_network_takes_cores_while_the_link_is_busy() -> None:
    def build_tasks() -> list[Task]:
        return [Task("compute", COMPUTE, 1.0), Task("send", LINK, 0.5)]

    assert simulate(build_tasks(), cores=1) == pytest.approx(1.0)
    assert simulate(build_tasks(), cores=1, network_cores=0.5) == pytest.approx(1.25)
    assert simulate(build_tasks(), cores=4, network_cores=3.5) == pytest.approx(1.25)
    assert simulate(build_tasks(), network_cores=3.5) == pytest.approx(1.0), "no thread waits for a core"
    everything = build_tasks()
    assert simulate(everything, cores=1, network_cores=9) == pytest.approx(1.45), "the threads keep a tenth"
    assert everything[1].end == pytest.approx(0.5)


@settings(deadline=None)
@given(profiles(), situations(), algorithms, st.floats(0, 20))
def test_a_network_that_takes_cores_delays_the_threads_of_a_node_without_overlap(
    profile: StepProfile, situation: Situation, algorithm: Algorithm, network_cores: float
) -> None:
    """Without overlap, no thread works while the link is busy."""
    alone = dataclasses.replace(situation, overlap=False)
    busy = dataclasses.replace(alone, network_cores=network_cores)
    assert predict_step(profile, busy, algorithm).step == pytest.approx(predict_step(profile, alone, algorithm).step)


def test_a_step_waits_for_the_cores_that_the_network_takes() -> None:
    """While buckets travel during backward, the ranks have half of the cores, so they do half of their work later."""
    gradients = tuple(Gradient(f"layer {number}", 1 << 20, 0.01) for number in range(16))
    profile = StepProfile("model", 0.1, gradients, bucket_bytes=4 << 20)
    situation = Situation(Machines(2, 2, 4e9, 1e15, 0.0), cores=2)
    steps = [
        predict_step(profile, dataclasses.replace(situation, network_cores=cores), find_algorithm("hierarchical"))
        for cores in (0.0, 1.0)
    ]
    sent = steps[0].wire * 15 / 16  # the last bucket travels when backward has ended
    assert steps[1].step - steps[0].step == pytest.approx(sent / 2, rel=0.02)


def test_a_lane_keeps_its_order_and_waits_overlap() -> None:
    first = Task("first", LATENCY, 2.0)
    lane = [Task("late", LINK, 1.0, (first,)), Task("behind it", LINK, 1.0)]
    waits = [Task("wait", LATENCY, 2.0) for _ in range(5)]
    assert simulate([first, *lane, *waits]) == pytest.approx(4.0)
    assert lane[1].start == pytest.approx(3.0)


def test_tasks_that_fill_gaps_run_last_first_while_nothing_else_can() -> None:
    ready = Task("ready", LATENCY, 1.5)
    fillers = [Task(str(number), LINK, 1.0, fills_gaps=True) for number in range(3)]
    ordinary = Task("ordinary", LINK, 1.0, (ready,))
    assert simulate([ready, *fillers, ordinary]) == pytest.approx(4.0)
    assert [task.start for task in fillers] == pytest.approx([3.0 + 0.0, 1.0, 0.0])
    assert ordinary.start == pytest.approx(2.0)


def test_tasks_that_wait_for_each_other_are_refused() -> None:
    first = Task("first", LINK, 1.0)
    second = Task("second", LINK, 1.0, (first,))
    first.after = (second,)
    with pytest.raises(ValueError, match="circle: first never starts"):
        simulate([first, second])


def test_a_slow_input_pipeline_bounds_the_step() -> None:
    profile = dataclasses.replace(build_uniform_profile(10**6, 0.1), data=0.5)
    situation = Situation(Machines(1, 1, 1e9, 1e10))
    assert predict_step(profile, situation, find_algorithm("hitopk")).step == pytest.approx(0.5)
    serial = dataclasses.replace(situation, is_input_pipelined=False)
    assert predict_step(profile, serial, find_algorithm("hitopk")).step == pytest.approx(0.6)


def test_the_slowest_of_more_ranks_is_slower() -> None:
    assert estimate_slowest(0.1, 1) == estimate_slowest(0, 4096) == 1
    assert estimate_slowest(0.1, 4) == pytest.approx(1.103, abs=0.002)
    assert estimate_slowest(0.1, 4096) == pytest.approx(1.354, abs=0.01)


def test_training_without_selection_on_a_processor_has_more_buckets() -> None:
    profile = dataclasses.replace(build_uniform_profile(25_000_000, 0.1), on_cpu=True)
    names = ("hierarchical", "hitopk", "int8")
    dense, sparse, quantised = (plan_bucket_lengths(profile, find_algorithm(name), 4, 4) for name in names)
    assert quantised == dense  # the rate of the link is unknown
    assert len(dense) > len(sparse) > 1
    assert sum(bucket.elements for bucket in dense) == sum(bucket.elements for bucket in sparse) == 25_000_000
    assert [bucket.last for bucket in dense] == sorted(bucket.last for bucket in dense)


def test_buckets_that_send_fewer_bytes_are_larger() -> None:
    """A bucket occupies the link for a while: with a quarter of the bytes, it has more elements."""
    rate = 1e9
    assert count_times_fewer_bytes(find_algorithm("hierarchical"), 2, 2) == 1
    assert count_times_fewer_bytes(find_algorithm("hierarchical"), 2, 2, "bf16") == 2
    times = count_times_fewer_bytes(find_algorithm("int8"), 2, 2)
    assert 3.9 < times < 4
    profile = dataclasses.replace(build_uniform_profile(25_000_000, 0.1), on_cpu=True)
    dense, fewer = (plan_bucket_lengths(profile, find_algorithm("int8"), 4, 4, factor * rate) for factor in (1, times))
    assert len(fewer) < len(dense)


@pytest.mark.parametrize(
    ("name", "parameters", "billions"),
    [
        ("resnet50", 25_557_032, 8.2),
        ("resnet50-96", 25_557_032, 1.5),
        ("bert-large", 336_222_010, 87),
        ("gpt2", 124_439_808, 292),
        ("7b", 6_738_415_616, 29_300),
    ],
)
def test_built_in_models_have_the_published_sizes(name: str, parameters: int, billions: float) -> None:
    """Parameters are those of the published models; ResNet-50 needs 4.1 billion multiplications per image."""
    model = find_model(name)
    assert model.parameters == parameters
    assert model.flops / 3e9 == pytest.approx(billions, rel=0.02)
    profile = model.build_profile(0.3)
    assert profile.elements == parameters
    assert profile.forward == pytest.approx(0.1)
    assert profile.backward == pytest.approx(0.2)


def test_equal_buckets_have_equal_exchanges_of_their_own_names() -> None:
    profile = StepProfile("x", 0.1, tuple(Gradient(str(number), 10**7, 0.01) for number in range(6)))
    prediction = predict_step(profile, Situation(Machines(2, 1, 1e9, 3e11)), find_algorithm("hitopk"))
    sent = {task.name: task.seconds for task in prediction.tasks if task.lane == LINK}
    assert list(sent) == [f"send bucket {number}" for number in range(6)]
    assert len(set(sent.values())) == 1


def test_a_dense_exchange_does_not_take_longer_with_thousands_of_nodes() -> None:
    """Rounds grow with the logarithm of the nodes, and bytes not at all."""
    profile, dense = find_model("resnet50").build_profile(0.2), find_algorithm("hierarchical")
    times = [predict_step(profile, Situation(Machines(nodes, 8, 3e9, 3e11)), dense).step for nodes in (16, 4096)]
    assert times[1] < 1.1 * times[0]


def test_a_model_larger_than_this_machine_is_planned() -> None:
    """Nothing of the size of a bucket is allocated, and the number of tasks does not grow with it."""
    profile = dataclasses.replace(build_uniform_profile(10**15, 1e6), on_cpu=True)
    prediction = predict_step(profile, Situation(Machines(2, 1, 1e12, 1e13)), HIERARCHICAL)
    assert prediction.step > 1e6
    assert len(prediction.tasks) < 10_000
