"""Look up algorithms by name: TopKube's own, those that installed packages declare, and those of the running script.

A package declares an algorithm through the entry-point group `topkube.algorithms`. The entry point has the name of the
algorithm and leads to its `Algorithm`. No package is loaded before one of its algorithms is looked up.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from topkube.algorithms.declaration import NAME, Algorithm
from topkube.algorithms.own import OWN
from topkube.errors import AlgorithmError, ArgumentError

GROUP = "topkube.algorithms"
_OWN = {algorithm.name: algorithm for algorithm in OWN}
_script_algorithms: dict[str, Algorithm] = {}


@dataclass(frozen=True)
class Package:
    """An installed package that declares an algorithm."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def names() -> tuple[str, ...]:
    """Return the names of all algorithms: TopKube's own first. No package is loaded."""
    return (*_OWN, *sorted({*_script_algorithms, *_find_entry_points()} - set(_OWN)))


def is_known(name: object) -> bool:
    """Return True if an algorithm of this name is in the catalogue. No package is loaded."""
    return isinstance(name, str) and (name in _OWN or name in _script_algorithms or name in _find_entry_points())


def find_algorithm(name: str) -> Algorithm:
    """Return the algorithm called `name`.

    Raises ArgumentError with the nearest name and all names if there is none, and AlgorithmError if its package cannot
    be loaded.
    """
    if not is_known(name):
        near = difflib.get_close_matches(str(name), names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ArgumentError(
            f"unknown algorithm {name!r}",
            cause="its package is not installed here" if "." in str(name) else "",
            next_step=f"{hint}choose one of {', '.join(names())}",
        )
    return _OWN.get(name) or _script_algorithms.get(name) or _load(name)


def load_all() -> tuple[list[Algorithm], list[AlgorithmError]]:
    """Return all algorithms, in the order of `names`, and one error for each that cannot be loaded."""
    algorithms, errors = [], []
    for name in names():
        try:
            algorithms.append(find_algorithm(name))
        except AlgorithmError as error:
            errors.append(error)
    errors += [_explain_hidden(name) for name in sorted(set(_OWN) & set(_find_entry_points()))]
    return algorithms, errors


def register(algorithm: Algorithm) -> Algorithm:
    """Add an algorithm of the running script, such as an experiment, and return it. All ranks must add it.

    Raises ArgumentError if its name has no PACKAGE or is taken.
    """
    if "." not in algorithm.name:
        raise ArgumentError(
            f"{algorithm.name!r} is a name for TopKube's own algorithms",
            next_step=f"call it PACKAGE.NAME, such as experiment.{algorithm.name}",
        )
    if is_known(algorithm.name) and _script_algorithms.get(algorithm.name) != algorithm:
        raise ArgumentError(f"there is already an algorithm called {algorithm.name!r}", next_step="choose another name")
    _script_algorithms[algorithm.name] = algorithm
    return algorithm


def find_package(name: str) -> Package | None:
    """Return the package that declares the algorithm called `name`; None for TopKube's own and those of the script."""
    points = () if name in _OWN or name in _script_algorithms else _find_entry_points().get(name, ())
    return _read_package(points[0]) if points else None


@functools.cache
def _find_entry_points() -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of all installed packages by the name of the algorithm. Several packages can declare the
    same name."""
    points: dict[str, dict[str, EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        points.setdefault(point.name, {}).setdefault(_read_package(point).name, point)
    return {name: tuple(by_package.values()) for name, by_package in points.items()}


def _read_package(point: EntryPoint) -> Package:
    return Package(point.dist.name, point.dist.version) if point.dist is not None else Package(point.value, "")


@functools.cache
def _load(name: str) -> Algorithm:
    point, *others = _find_entry_points()[name]
    package = _read_package(point)
    if others:
        raise AlgorithmError(
            f"the packages {package} and {_read_package(others[0])} both declare the algorithm {name!r}",
            package=package.name,
            next_step="uninstall one of them",
        )
    if not re.fullmatch(rf"{NAME}\.{NAME}", name):
        raise _explain_failure(package, name, "an algorithm of another package must be called PACKAGE.NAME")
    try:
        algorithm = point.load()
    except Exception as error:
        raise _explain_failure(package, name, f"{type(error).__name__}: {error}") from error
    if not isinstance(algorithm, Algorithm):
        raise _explain_failure(package, name, f"{point.value} is not a topkube.algorithms.Algorithm")
    if algorithm.name != name:
        raise _explain_failure(package, name, f"{point.value} calls itself {algorithm.name!r}")
    return algorithm


def _explain_failure(package: Package, name: str, reason: str) -> AlgorithmError:
    return AlgorithmError(
        f"the package {package} declares the algorithm {name!r}, which cannot be loaded: {reason}",
        package=package.name,
        cause="the package is incomplete, or it was made for another version of TopKube",
        next_step=f"upgrade the package, or remove it: pip uninstall {package.name}",
    )


def _explain_hidden(name: str) -> AlgorithmError:
    package = _read_package(_find_entry_points()[name][0])
    return _explain_failure(package, name, "TopKube has an algorithm of this name, which is used instead")
