"""What can go wrong, split by who must act; each kind knows the status the process ends with.

Nothing is caught by the base class except at the edge, where a command turns it into a message.
"""

from typing import ClassVar


class EverstepError(Exception):
    """The base. The text says what happened and what to do about it."""

    exit_status: ClassVar[int] = 70


class OperatorError(EverstepError):
    """The person or program that gave the command must change it, or look again."""

    exit_status = 1


class NotRunning(OperatorError):
    """No daemon runs this job, or it does not answer."""


class Refused(OperatorError):
    """The daemon understood the order and declines it."""


class AlreadyRunning(OperatorError):
    """Another daemon holds the job; the text names it, its host and since when."""

    exit_status = 73


class Superseded(AlreadyRunning):
    """The epoch of this daemon is over: a newer one runs the job; the text names it."""


class HostError(EverstepError):
    """The machine, its disk or the cluster must be mended first; trying again changes nothing."""

    exit_status = 4


class DiskError(HostError):
    """A file of the run cannot be read or written."""


class RunDirectoryLost(DiskError):
    """The run directory was moved or deleted while the job ran."""


class JournalLost(DiskError):
    """Told to end while nothing can be written, so that it ends and leaves the workers alone."""

    exit_status = 75


class ClusterUnusable(HostError):
    """Ray, or Redis, cannot be started, reached, or made to fit the job."""


class DeveloperError(EverstepError):
    """A bug of ours. The text is the story that led to it, fit to be reported as it is."""
