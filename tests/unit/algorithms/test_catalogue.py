"""The catalogue: TopKube's own algorithms, those of packages, and packages that are broken."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from algorithms.packages import install, install_page

from topkube import algorithms
from topkube.algorithms import OWN, PARAMETERS, Workload, catalogue, find_algorithm
from topkube.cli.doctor.software import check_algorithms
from topkube.collectives import all_reduce
from topkube.errors import AlgorithmError, ArgumentError, JobError
from topkube.job import TrainingJob
from topkube.job.algorithm_name import is_foreign
from topkube_operator.planning.admission import list_warnings

HITOPK = find_algorithm("hitopk")
JOB = {
    "apiVersion": "topkube.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "one"},
    "spec": {
        "workers": 2,
        "template": {"spec": {"containers": [{"name": "worker", "image": "example:1", "command": ["true"]}]}},
    },
}


def parse_job(algorithm: object) -> TrainingJob:
    return TrainingJob.parse({**JOB, "spec": {**JOB["spec"], "aggregation": {"algorithm": algorithm}}})  # type: ignore[dict-item]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of `sys.path`, like site-packages."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))
    caches = (catalogue._find_entry_points, catalogue._load)
    for cache in caches:
        cache.cache_clear()
    yield directory
    for cache in caches:
        cache.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("acme_topkube", "broken_package")]:
        del sys.modules[name]


def test_every_declaration_has_an_implementation_that_fits() -> None:
    for algorithm in OWN:
        implementation = all_reduce.load(algorithm)
        assert implementation.algorithm is algorithm
        assert isinstance(implementation, all_reduce.ShardAllReduce) or not algorithm.on_device


def test_the_catalogue_imports_no_implementation() -> None:
    """The operator imports the catalogue: it must not bring NumPy, torch or MPI, and no implementation."""
    heavy = "'numpy', 'torch', 'mpi4py', 'topkube.collectives'"
    code = f"import sys, topkube.algorithms; print([name for name in ({heavy}) if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_no_other_module_names_an_algorithm() -> None:
    """All that depends on an algorithm follows its declaration. `allreduce_` has a default for scripts."""
    root = Path(__file__).parents[3]
    allowed = {("runtime/topkube/algorithms/own.py", algorithm.name) for algorithm in OWN}
    allowed |= {("runtime/topkube/collectives/__init__.py", "hitopk")}
    allowed |= {("runtime/topkube/integrations/ddp.py", "hitopk")}  # the only sparse algorithm of DDP's hook
    allowed |= {("runtime/topkube/bench/ddp.py", "powersgd")}  # a hook of DDP has the same name
    # "nccl" is also the library: the name of torch's backend, and a line of `topkube doctor`.
    allowed |= {
        (f"runtime/topkube/{file}.py", "nccl") for file in ("collectives/device/rank_group", "cli/doctor/gpu_checks")
    }
    named = set()
    for path in [*(root / "runtime/topkube").rglob("*.py"), *(root / "operator").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in {algorithm.name for algorithm in OWN}:
                named.add((str(path.relative_to(root)), node.value))
    assert named - allowed == set()


def test_the_state_of_a_rank_follows_from_its_scope() -> None:
    load = Workload(nodes=2, slots=4, elements=1_000_000)
    assert {a.name: a.state_bytes(load) for a in OWN if a.state} == {
        "hitopk": 1_000_000,
        "gtopk": 1_000_000,
        "oktopk": 1_000_000,
        "naive": 4_000_000,
        "int8": 1_000_000,
        "int4": 1_000_000,
        "int3": 1_000_000,
        "onebit": 1_000_000,
        "topk1bit": 1_000_000,
        "powersgd": 1_000_000,
        "acpsgd": 1_000_000,
        "localsgd": 1_000_000,
        "diloco": 2_000_000,
        "sparseloco": 1_000_000,
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "Hitopk"}, "is not the name of an algorithm"),
        ({"name": "a.b.c"}, "is not the name of an algorithm"),
        ({"name": "a" * 101}, "is not the name of an algorithm"),
        ({"implementation": "a class"}, "import path"),
        (
            {"parameters": (dataclasses.replace(PARAMETERS["density"], name="rank"),)},
            "'rank', which no TrainingJob has",
        ),
    ],
)
def test_mistakes_of_a_declaration_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        dataclasses.replace(HITOPK, **changes)  # type: ignore[arg-type]


def test_a_script_registers_its_own_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_script_algorithms", {})
    own = algorithms.register(dataclasses.replace(HITOPK, name="mine.top"))
    assert algorithms.register(own) is find_algorithm("mine.top") is own
    assert "mine.top" in algorithms.names()
    assert parse_job("mine.top").spec.aggregation.algorithm == "mine.top"
    with pytest.raises(ArgumentError, match=r"already an algorithm called 'mine[.]top'"):
        algorithms.register(dataclasses.replace(own, summary="another"))
    with pytest.raises(ArgumentError, match=r"call it PACKAGE\.NAME, such as experiment\.top"):
        algorithms.register(dataclasses.replace(HITOPK, name="top"))


def test_an_installed_algorithm_is_in_the_catalogue_and_in_jobs(site: Path) -> None:
    assert is_foreign("acme.stride-k")
    assert "is not known here" in list_warnings(parse_job("acme.stride-k"))[0]
    install_page(site)
    catalogue._find_entry_points.cache_clear()
    assert "acme_topkube" not in sys.modules
    assert algorithms.names()[-1] == "acme.stride-k"
    assert "acme_topkube" not in sys.modules, "listing names must not load packages"
    assert find_algorithm("acme.stride-k").on_device
    assert str(algorithms.find_package("acme.stride-k")) == "acme-topkube 1.0"
    assert list_warnings(parse_job("acme.stride-k")) == []
    with pytest.raises(JobError, match=r"'acme.stridek' is not one of auto, .*did you mean acme.stride-k\?"):
        parse_job("acme.stridek")
    with pytest.raises(ArgumentError, match=r"did you mean 'acme.stride-k'\?"):
        find_algorithm("acme.stride")


def test_names_of_packages_that_are_not_here_are_accepted_if_well_formed() -> None:
    assert parse_job("other.algorithm-2").spec.aggregation.algorithm == "other.algorithm-2"
    for name in ("other.", ".x", "Other.x", "a.b.c", "other.x\n", "x" * 60 + "." + "y" * 60, "stride-k"):
        with pytest.raises(JobError, match="is not one of auto, dense, "):
            parse_job(name)


def test_plan_lists_the_algorithm(tmp_path: Path) -> None:
    install_page(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "topkube.cli", "plan", "--workers", "16", "-o", "json"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = {row["algorithm"]: row for row in json.loads(ended.stdout)["algorithms"]}
    assert rows["acme.stride-k"]["sentBytes"] == round(2 * 15 / 16 * 4 * 256_000)
    assert rows["acme.stride-k"]["stateBytes"] == 4 * 25_600_000


def test_doctor_lists_the_algorithm_with_its_package_and_names_broken_packages(site: Path) -> None:
    install_page(site)
    install(site, "broken-package", "0.3", {"broken.x": "broken_package:X"})
    usable, broken = check_algorithms()
    assert (usable.name, usable.state) == ("algorithms", "ok")
    assert usable.message == f"{', '.join(a.name for a in OWN)}; acme-topkube 1.0: acme.stride-k"
    assert (broken.name, broken.state) == ("algorithms", "warn")
    assert "broken-package 0.3 declares the algorithm 'broken.x'" in broken.message
    assert "pip uninstall broken-package" in broken.next_step


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("import nothing_of_this_name", "broken_package:X", "No module named 'nothing_of_this_name'"),
        ("raise SystemError('no')", "broken_package:X", "SystemError: no"),
        ("", "broken_package:X", "AttributeError"),
        ("X = 3", "broken_package:X", "is not a topkube.algorithms.Algorithm"),
        (
            "from topkube.algorithms import find_algorithm; X = find_algorithm('hitopk')",
            "broken_package:X",
            "calls itself 'hitopk'",
        ),
    ],
)
def test_a_broken_package_is_named_and_breaks_nothing_else(site: Path, text: str, place: str, reason: str) -> None:
    (site / "broken_package.py").write_text(text)
    install(site, "broken-package", "0.3", {"broken.x": place})
    with pytest.raises(AlgorithmError, match=r"broken-package 0\.3") as raised:
        find_algorithm("broken.x")
    assert reason in str(raised.value)
    assert raised.value.package == "broken-package"
    with pytest.raises(JobError, match=r"broken-package 0\.3"):
        parse_job("broken.x")
    listed, errors = algorithms.load_all()
    assert tuple(listed) == OWN
    assert [error.package for error in errors] == ["broken-package"]
    assert find_algorithm("hitopk") is HITOPK
    assert algorithms.describe("broken.x", 0.1) == "broken.x at density 0.1"


def test_two_packages_with_one_name_are_both_named(site: Path) -> None:
    install_page(site)
    install(site, "twin", "2", {"acme.stride-k": "acme_topkube:STRIDE_K"})
    with pytest.raises(AlgorithmError, match=r"acme-topkube 1\.0 and twin 2|twin 2 and acme-topkube 1\.0"):
        find_algorithm("acme.stride-k")


@pytest.mark.parametrize("name", ["hitopk", "fast"])
def test_a_package_cannot_take_a_name_of_topkube(site: Path, name: str) -> None:
    install_page(site)
    install(site, "greedy", "1", {name: "acme_topkube:STRIDE_K"})
    assert find_algorithm("hitopk") is HITOPK
    [error] = algorithms.load_all()[1]
    assert error.package == "greedy"


def test_an_implementation_that_cannot_be_used_names_its_package(site: Path) -> None:
    install_page(site)
    (site / "acme_topkube/stride_k.py").write_text("StrideK = int\n")
    with pytest.raises(
        AlgorithmError, match=r"acme-topkube 1\.0.*not a subclass of topkube.collectives.ShardAllReduce"
    ):
        all_reduce.load(find_algorithm("acme.stride-k"))
