"""`spec.topology`: the label of nodes by which workers are placed close to each other."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from topkube.job.base.part import Allowed, Part

_LABEL_PREFIX = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_LABEL_KEY = rf"^({_LABEL_PREFIX}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?$"


class Topology(Part):
    """How close to each other workers are placed."""

    key: Annotated[
        str,
        StringConstraints(max_length=317, pattern=_LABEL_KEY),
        Allowed("a label of nodes, such as topology.kubernetes.io/zone"),
    ] = Field(description="label of nodes that names their zone, rack or block")
    mode: Literal["Preferred", "Required"] = Field(
        default="Preferred",
        description="Preferred: the scheduler puts workers into one zone, rack or block if they fit; Required: workers "
        "that do not fit wait",
    )
