"""The exceptions a user can meet; each carries the process exit code of its kind.

    OledMoeError                1  failed while running
    ├── QueueFullError          1  more requests wait than may
    ├── ShuttingDownError       1  no request is taken any more, or this one was cut short
    ├── DownloadError           1  a download broke off, or what came is damaged
    ├── ConfigError             2  a flag, a parameter, a config value
    ├── InputError              2  a prompt, a message, a token id
    ├── CheckpointError         2  a file that is corrupt, incomplete or not supported
    ├── TraceError              2  a routing trace that is corrupt, or lacks what is needed
    │   └── TraceNotFoundError  3  no file at that path
    ├── ModelNotFoundError      3  nothing at that path, no such hub id in the local cache
    ├── ServerNotFoundError     3  no server answers at that address
    ├── ExperimentNotFoundError 3  the experiments lie in a checkout, and this is none
    ├── DoesNotFitError         4  the memory plan cannot work
    └── MissingDependencyError  5  an optional package, named

Every message is one sentence or two: what is wrong and where, what is allowed, what to do.
"""


class OledMoeError(Exception):
    """Base of all errors meant for the user."""

    exit_code = 1


class QueueFullError(OledMoeError):
    """As many requests wait as may; `retry_after_s` is a guess at when one will have gone."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDownError(OledMoeError):
    """The scheduler is closing."""


class DownloadError(OledMoeError):
    """A download broke off, or what came is not what the hub has."""


class ConfigError(OledMoeError, ValueError):
    """A parameter has a value that is not allowed."""

    exit_code = 2


class InputError(OledMoeError, ValueError):
    """A prompt or message cannot be used as given."""

    exit_code = 2


class CheckpointError(OledMoeError):
    """A checkpoint is corrupt, incomplete or of a kind that is not read."""

    exit_code = 2


class TraceError(OledMoeError):
    """A routing trace is corrupt, of another version, or lacks what a policy looks at."""

    exit_code = 2


class TraceNotFoundError(TraceError):
    """No trace at the path that was named."""

    exit_code = 3


class ModelNotFoundError(OledMoeError):
    """No model at the place that was named."""

    exit_code = 3


class ServerNotFoundError(OledMoeError):
    """Nothing answers at the address that was named."""

    exit_code = 3


class ExperimentNotFoundError(OledMoeError):
    """The package is installed without the repository's experiments."""

    exit_code = 3


class DoesNotFitError(OledMoeError):
    """The memory that was granted cannot hold what was asked for."""

    exit_code = 4


class MissingDependencyError(OledMoeError):
    """An optional dependency is not installed."""

    exit_code = 5
