"""Where a job can be. The value of each member is its sentence in state_machine.md."""

from enum import Enum, unique


@unique
class State(Enum):
    """The states of a job; flat on purpose."""

    PROVISIONING = "Ray is placing the slots."
    INITIALIZING = (
        "The workers start, join `jax.distributed`, build the mesh, compile, "
        "and load the starting state."
    )
    RUNNING = "All workers report steps; every monitor is armed."
    DRAINING = (
        "The active generation is brought down: evidence is collected, a last checkpoint is "
        "written if the purpose asks for it, the processes are ended and proven gone."
    )
    RESTORING = "A restore point is chosen, and new workers start in the slots and load it."
    FAILED = "The job cannot go on; a person has to look."
    COMPLETED = "The last step is committed."
    STOPPED = "Somebody asked for the end; the same command resumes the job."


TERMINAL = frozenset({State.FAILED, State.COMPLETED, State.STOPPED})
LIVE = tuple(state for state in State if state not in TERMINAL)
