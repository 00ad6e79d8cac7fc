"""`spec.launcher`: the pod that starts MPI across the workers, and its resources."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, ValidationInfo, field_validator

from topkube.job.base.part import Part, Quantity, declare_rules, limit_entries, raise_problems
from topkube.job.base.quantity import parse_quantity
from topkube.job.template import find_mapping_problems


class Resources(Part):
    """The resources of one container."""

    requests: Annotated[dict[str, Quantity], BeforeValidator(limit_entries)] = Field(
        default={}, description="amounts that the scheduler reserves, by resource, such as {cpu: 50m, memory: 96Mi}"
    )
    limits: Annotated[dict[str, Quantity], BeforeValidator(limit_entries)] = Field(
        default={},
        description="the most that the container may use, by resource; equal to requests in a Guaranteed pod",
    )

    @field_validator("limits")
    @classmethod
    def _check_limits(cls, limits: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        requests: dict[str, str] = info.data.get("requests") or {}
        amounts = {name: (parse_quantity(requests.get(name)), parse_quantity(limit)) for name, limit in limits.items()}
        raise_problems(
            [
                ((name,), f"{limits[name]} is less than the request of {requests[name]}")
                for name, (request, limit) in amounts.items()
                if request is not None and limit is not None and limit < request
            ]
        )
        return limits


class Launcher(Part):
    """The pod that starts MPI across the workers."""

    model_config = ConfigDict(
        json_schema_extra=declare_rules(
            (
                "!has(self.template) || !has(self.colocate) || !self.colocate",
                "template has no effect when colocate is true: remove one of the two",
            )
        )
    )

    colocate: bool = Field(
        default=False, description="true: run the launcher inside worker 0; false: run it in a pod of its own"
    )
    template: dict[str, JsonValue] | None = Field(
        default=None,
        description="pod template of the launcher, kept as written: tolerations, service account, resources. "
        "Placement, labels and the pod's security context come from the workers' template unless they are set here",
    )
    resources: Resources | None = Field(
        default=None,
        description="resources of the launcher's container, also inside worker 0, unless its template has resources; "
        "by default small requests, and limits if the worker has limits",
    )

    @field_validator("template")
    @classmethod
    def _check_template(
        cls, template: dict[str, JsonValue] | None, info: ValidationInfo
    ) -> dict[str, JsonValue] | None:
        if template is not None and info.data.get("colocate"):
            raise ValueError("has no effect when colocate is true: remove one of the two")
        raise_problems(find_mapping_problems(template or {}))
        return template
