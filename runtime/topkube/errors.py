"""Every error that a user can meet, one type per layer that can fail.

A message says three things, in this order: what happened, the likely cause, and the next step. `TopKubeError` puts them
together, so that no place can forget one.
"""

from __future__ import annotations

from collections.abc import Iterable


class TopKubeError(Exception):
    """Base of all errors of this package; catching it catches everything that TopKube raises on purpose."""

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
    """An environment variable holds something unusable; nothing has started yet."""


class JobError(TopKubeError, ValueError):
    """A TrainingJob is not valid. `problems` holds one line per mistake, all of them."""

    def __init__(self, what: str, problems: Iterable[str] = (), *, cause: str = "", next_step: str = "") -> None:
        self.problems = tuple(problems)
        listed = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(what + (":" + listed if listed else ""), cause=cause, next_step=next_step)


class ArgumentError(TopKubeError, ValueError):
    """An array or a parameter cannot be used as given; nothing has been written to any array."""


class DeviceError(TopKubeError, RuntimeError):
    """A GPU cannot do what was asked: this build has no CUDA kernels, memory is full, or CUDA refused. Nothing was
    written."""


class WireError(TopKubeError, ValueError):
    """A wire buffer is truncated, damaged or not ours; nothing has been written to the destination."""


class WorldError(TopKubeError, RuntimeError):
    """The ranks could not form a world (no MPI, two MPIs, `init` not called); no communication is possible."""


class CollectiveError(TopKubeError, RuntimeError):
    """A collective failed. The world is out of step after it: end the process, retrying is useless."""


class CollectiveTimeout(CollectiveError):
    """A collective's deadline passed. `missing` names the ranks that never arrived; retrying is useless."""

    def __init__(self, what: str, missing: Iterable[int] = (), *, cause: str = "", next_step: str = "") -> None:
        self.missing = tuple(sorted(missing))
        super().__init__(what, cause=cause, next_step=next_step)


class MismatchError(CollectiveError):
    """Ranks entered one collective with different lengths, dtypes or parameters."""


class TrainingError(TopKubeError, RuntimeError):
    """The optimizer or the training loop was used in a way that cannot give right gradients."""


class CheckpointError(TopKubeError, RuntimeError):
    """A checkpoint could not be written or read; the newest complete one is still in place."""


class StorageError(CheckpointError):
    """The disk refused a checkpoint (full, read-only, failing); the one before is still in place, so that training may
    go on."""


class LaunchError(TopKubeError, RuntimeError):
    """Ranks could not be started, or one of them failed; all have ended. `exit_code` is the first failing one's."""

    def __init__(self, what: str, *, exit_code: int = 1, cause: str = "", next_step: str = "") -> None:
        self.exit_code = exit_code
        super().__init__(what, cause=cause, next_step=next_step)


class ClusterError(TopKubeError, RuntimeError):
    """A Kubernetes cluster is not there or refused a request; nothing was changed by it. `status` is HTTP's, or 0;
    `unknown_kind` says that the server does not serve the kind at all."""

    def __init__(
        self, what: str, *, status: int = 0, unknown_kind: bool = False, cause: str = "", next_step: str = ""
    ) -> None:
        self.status, self.unknown_kind = status, unknown_kind
        super().__init__(what, cause=cause, next_step=next_step)

    @property
    def passing(self) -> bool:
        """Whether a server that has answered before may soon do so again: it restarts (and knows no kind at first), or
        has too much to do."""
        return self.status in (0, 429) or self.status >= 500 or self.unknown_kind


class DatasetError(TopKubeError, ValueError):
    """A dataset or a cache's limits cannot be used as given; nothing has been fetched."""


class StoreError(TopKubeError, RuntimeError):
    """The remote store did not give what it lists, after all retries; what is cached stays good."""


class CacheError(TopKubeError, RuntimeError):
    """A cache directory is not ours, or of a newer format; it is untouched."""
