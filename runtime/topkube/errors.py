"""The errors that TopKube raises on purpose, with a type for each layer that can fail.

A message has three parts, in this order: what happened, the likely cause, and the next step. `TopKubeError` builds the
message from these parts.
"""

from __future__ import annotations

from collections.abc import Iterable


class TopKubeError(Exception):
    """The base class of all errors that TopKube raises on purpose."""

    def __init__(self, what: str, *, cause: str = "", next_step: str = "") -> None:
        self.what, self.cause, self.next_step = what, cause, next_step
        parts = [what.rstrip(".") + "."]
        if cause:
            parts.append(f"Likely cause: {cause.rstrip('.')}.")
        if next_step:
            parts.append(f"Next: {next_step.rstrip('.')}.")
        super().__init__(" ".join(parts))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.__dict__, str(self)))


def _rebuild(kind: type[TopKubeError], state: dict[str, object], message: str) -> TopKubeError:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class SettingsError(TopKubeError, ValueError):
    """An environment variable has an invalid value; nothing has started yet."""


class JobError(TopKubeError, ValueError):
    """A TrainingJob is not valid. `problems` holds a line for each of the first MOST_PROBLEMS mistakes, with at most
    LONGEST_PROBLEM characters: the webhook must not answer an unknown caller with more."""

    MOST_PROBLEMS, LONGEST_PROBLEM = 50, 600

    def __init__(self, what: str, problems: Iterable[str] = (), *, cause: str = "", next_step: str = "") -> None:
        lines = tuple(problems)
        self.problems = tuple(map(self._shorten, lines[: self.MOST_PROBLEMS]))
        more = f"\n  - … and {len(lines) - self.MOST_PROBLEMS} more" if len(lines) > self.MOST_PROBLEMS else ""
        listed = "".join(f"\n  - {problem}" for problem in self.problems) + more
        super().__init__(what + (":" + listed if listed else ""), cause=cause, next_step=next_step)

    @classmethod
    def _shorten(cls, problem: str) -> str:
        return problem if len(problem) <= cls.LONGEST_PROBLEM else problem[: cls.LONGEST_PROBLEM - 1] + "…"


class ArgumentError(TopKubeError, ValueError):
    """An array or a parameter is invalid; nothing has been written to any array."""


class AlgorithmError(TopKubeError, RuntimeError):
    """An installed package declares an algorithm that cannot be loaded. `package` is its name. Other algorithms
    work."""

    def __init__(self, what: str, *, package: str = "", cause: str = "", next_step: str = "") -> None:
        self.package = package
        super().__init__(what, cause=cause, next_step=next_step)


class DeviceError(TopKubeError, RuntimeError):
    """A GPU cannot be used: this build has no CUDA kernels, its memory is full, or CUDA reported an error. Nothing was
    written."""


class WireError(TopKubeError, ValueError):
    """A wire buffer is truncated, corrupt or in another format; nothing has been written to the destination."""


class WorldError(TopKubeError, RuntimeError):
    """The ranks could not form a world (no MPI, two MPIs, `init` not called); no communication is possible."""


class CollectiveError(TopKubeError, RuntimeError):
    """A collective failed. The ranks are out of step after it: end the process, because a retry cannot succeed."""


class CollectiveTimeout(CollectiveError):
    """A collective's deadline passed. `missing` holds the ranks that never entered it. A retry cannot succeed."""

    def __init__(self, what: str, missing: Iterable[int] = (), *, cause: str = "", next_step: str = "") -> None:
        self.missing = tuple(sorted(missing))
        super().__init__(what, cause=cause, next_step=next_step)


class MismatchError(CollectiveError):
    """Ranks entered a collective with different lengths, dtypes or parameters."""


class TrainingError(TopKubeError, RuntimeError):
    """The optimizer or the training loop was used in a way that cannot produce correct gradients."""


class CheckpointError(TopKubeError, RuntimeError):
    """A checkpoint could not be written or read; the newest complete checkpoint still exists. `is_of_others` is True if
    only other ranks have failed: the message names them, and their output has the reason."""

    is_of_others = False


class StorageError(CheckpointError):
    """The storage did not take a checkpoint: it is full, read-only, failing or does not answer, or the temporary folder
    was removed. The previous checkpoint still exists, so training may continue."""


class LaunchError(TopKubeError, RuntimeError):
    """Ranks could not be started, or a rank failed; all ranks have ended. `exit_code` is that of the rank that failed
    first."""

    def __init__(self, what: str, *, exit_code: int = 1, cause: str = "", next_step: str = "") -> None:
        self.exit_code = exit_code
        super().__init__(what, cause=cause, next_step=next_step)


class SourceError(TopKubeError, RuntimeError):
    """The code of a job or its packages cannot be packed, fetched or installed; no rank has started. `reason` becomes
    the reason of `status.firstFailure`."""

    def __init__(self, what: str, *, reason: str = "SourceInvalid", cause: str = "", next_step: str = "") -> None:
        self.reason = reason
        super().__init__(what, cause=cause, next_step=next_step)


class ClusterError(TopKubeError, RuntimeError):
    """A Kubernetes cluster cannot be reached or refused a request; the request changed nothing. `status` is the HTTP
    status, or 0. `unknown_kind` is True if the server does not serve the kind."""

    def __init__(
        self, what: str, *, status: int = 0, unknown_kind: bool = False, cause: str = "", next_step: str = ""
    ) -> None:
        self.status, self.unknown_kind = status, unknown_kind
        super().__init__(what, cause=cause, next_step=next_step)

    @property
    def passing(self) -> bool:
        """True if a server that has answered before may soon answer again: it restarts (and serves no kinds at first),
        or it is overloaded."""
        return self.status in (0, 429) or self.status >= 500 or self.unknown_kind


class DatasetError(TopKubeError, ValueError):
    """A dataset or the limits of a cache are invalid; nothing has been fetched."""


class StoreError(TopKubeError, RuntimeError):
    """The remote store did not return an object that it lists, after all retries; cached data stays valid."""


class CacheError(TopKubeError, RuntimeError):
    """A directory is not a cache of TopKube, or it has a newer format; it is unchanged. Or the directory of a view
    cannot be written."""
