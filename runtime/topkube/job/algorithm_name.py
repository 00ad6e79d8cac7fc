"""The name of an all-reduce algorithm in a TrainingJob.

The CRD and the operator know TopKube's own algorithms. An algorithm of another package is called PACKAGE.NAME. If
no algorithm of PACKAGE is installed, any such name is accepted: the operator's image needs no package that only the
workers run. The workers check the name when they start.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema

from topkube.algorithms import CHOICES, OWN, find_algorithm, is_known, names
from topkube.algorithms.declaration import NAME
from topkube.errors import AlgorithmError
from topkube.job.base.part import Allowed

_OWN = (*CHOICES, *(algorithm.name for algorithm in OWN))
_PATTERN = rf"^{NAME}\.{NAME}$"
_LONGEST = 100
_ALLOWED = f"one of {', '.join(_OWN)}; or PACKAGE.NAME, an algorithm of a package that the workers' image has"
EXPLAINED = "the all-reduce. " + "; ".join(
    [f"{name}: {sentence}" for name, sentence in CHOICES.items()]
    + [f"{algorithm.name}: {algorithm.summary}" for algorithm in OWN]
    + ["PACKAGE.NAME: an algorithm of a package that the workers' image has"]
)
"""The description of the field, from the declarations."""


def is_foreign(name: str) -> bool:
    """Return True if `name` is of the form PACKAGE.NAME and no such algorithm is installed here."""
    return "." in name and not is_known(name)


def _check_algorithm_name(name: str) -> str:
    if name in _OWN:
        return name
    package, dot, _ = name.partition(".")
    of_package = [other for other in names() if dot and other.startswith(f"{package}.")]
    if is_known(name):
        try:
            find_algorithm(name)
        except AlgorithmError as error:
            raise ValueError(str(error)) from None
        return name
    if dot and not of_package and _is_well_formed(name):
        return name
    near = difflib.get_close_matches(name, [*of_package, *_OWN], 1, 0.5)
    guess = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"'{name[:_LONGEST]}' is not {_ALLOWED}{guess}")


def _is_well_formed(name: str) -> bool:
    return len(name) <= _LONGEST and re.fullmatch(_PATTERN, name) is not None


# One pattern, because the API server does not name the field if an alternative of `anyOf` fails.
_SCHEMA: dict[str, Any] = {
    "type": "string",
    "maxLength": _LONGEST,
    "pattern": rf"^({'|'.join(_OWN)}|{NAME}\.{NAME})$",
}
AlgorithmName = Annotated[str, AfterValidator(_check_algorithm_name), Allowed(_ALLOWED), WithJsonSchema(_SCHEMA)]
