"""The TrainingJob: types, defaults, validation. One definition for the local run, the operator, admission and the CRD.

`metadata`, `spec` and `status` define the types of the job's three parts, and `fields` the types of the spec's fields.
`base` has what all types share: `reading` returns the data of a YAML file and the line of every value, and `problems`
describes mistakes and what is allowed. `training_job` combines the three parts, and `reference` writes
docs/trainingjob.md.
"""

from topkube.job.fields.aggregation import Aggregation
from topkube.job.fields.checkpoint import Checkpoint
from topkube.job.fields.dataset import Cache, Dataset
from topkube.job.fields.failure_policy import FailurePolicy, FailureRule, OnExitCodes
from topkube.job.fields.launcher import Launcher
from topkube.job.fields.run_policy import RunPolicy, SchedulingPolicy
from topkube.job.fields.source import ArchiveSource, ConfigMapSource, GitSource, Setup, Source, SourceItem
from topkube.job.metadata import Metadata
from topkube.job.spec import Spec
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
