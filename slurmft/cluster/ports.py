"""The ports of an attempt; apart from `ending`: commands that look at runs need no sockets."""

from slurmft.node import rendezvous
from slurmft.node.rendezvous import RendezvousError
from slurmft.runs.rundir import RunDir


def ports_of_attempt(run: RunDir) -> list[int]:
    """Returns the ports of an attempt.

    Raises:
        RendezvousError: none are free. It is recorded as the reason why the run fails.
    """
    try:
        return rendezvous.free_ports()
    except RendezvousError as error:
        run.set_state("failed", f"{error.message} ({error.hint})", error.code)()
        raise
