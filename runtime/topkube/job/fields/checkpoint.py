"""`spec.checkpoint`: where and how often the training state is saved."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, field_validator

from topkube.job.base.part import INT32, Allowed, ObjectName, Part, declare_rules


class Checkpoint(Part):
    """Where and how often the training state is saved."""

    claim_name: ObjectName = Field(
        description="persistent volume claim for checkpoints; it must be ReadWriteMany if workers are on several "
        "nodes. A local run saves in its run directory"
    )
    path: Annotated[
        str,
        StringConstraints(max_length=1024, pattern=r"^[^/\x00]"),
        Allowed("a relative path inside the claim, without '..'"),
    ] = Field(
        default="checkpoints",
        description="directory in the claim",
        json_schema_extra=declare_rules(("!self.matches('(^|/)[.][.](/|$)')", "leaves the claim: '..' is not allowed")),
    )
    every_steps: int = Field(default=500, ge=1, le=INT32, description="number of steps between two checkpoints")
    keep: int = Field(default=3, ge=1, le=INT32, description="number of checkpoints to keep")

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        if ".." in path.split("/"):
            raise ValueError(f"{path!r} leaves the claim: '..' is not allowed")
        return path
