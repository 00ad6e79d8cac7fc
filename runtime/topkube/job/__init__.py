"""The TrainingJob: types, defaults, validation. One definition for the local run, the operator, admission and the CRD.

`spec` and `status` hold the types. `base` has what all types share: `reading` returns the data of a YAML file and the
line of every value, `problems` describes mistakes and what is allowed. `training_job` puts them together, and
`reference` writes docs/trainingjob.md.
"""

from topkube.job.failure_policy import FailurePolicy, FailureRule, OnExitCodes
from topkube.job.source import ArchiveSource, ConfigMapSource, GitSource, Setup, Source, SourceItem
from topkube.job.spec import (
    Aggregation,
    Cache,
    Checkpoint,
    Dataset,
    Launcher,
    Metadata,
    RunPolicy,
    SchedulingPolicy,
    Spec,
)
from topkube.job.status import (
    CachedNode,
    CacheStatus,
    Condition,
    FirstFailure,
    Progress,
    ReplicaCount,
    ReplicaStatuses,
    Status,
)
from topkube.job.training_job import API_VERSION, KIND, TrainingJob

__all__ = [
    "API_VERSION",
    "KIND",
    "Aggregation",
    "ArchiveSource",
    "Cache",
    "CacheStatus",
    "CachedNode",
    "Checkpoint",
    "Condition",
    "ConfigMapSource",
    "Dataset",
    "FailurePolicy",
    "FailureRule",
    "FirstFailure",
    "GitSource",
    "Launcher",
    "Metadata",
    "OnExitCodes",
    "Progress",
    "ReplicaCount",
    "ReplicaStatuses",
    "RunPolicy",
    "SchedulingPolicy",
    "Setup",
    "Source",
    "SourceItem",
    "Spec",
    "Status",
    "TrainingJob",
]
