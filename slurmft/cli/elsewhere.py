"""How commands behave with `--on CLUSTER`: each module of a command says it of itself.

    ELSEWHERE = Elsewhere.SUBMITS | Elsewhere.SENDS_FOLDER

A command of another package that says nothing is run on the cluster as it was typed.
"""

from enum import Flag, auto


class Elsewhere(Flag):
    """What a command needs, beyond its words and the files that they name, to run on a cluster."""

    PLAIN = 0
    """Nothing: its words mean what is there."""
    HERE = auto()
    """It does its work on this machine, and connects to the cluster by itself if it must."""
    SUBMITS = auto()
    """It submits a run. A request goes with it: the same command again, after a connection that was
    cut, finds the run that the first one has submitted."""
    SENDS_FOLDER = auto()
    """It runs programs of this folder: a snapshot of the folder is sent."""
    SENDS_TASK = auto()
    """It may run a task of the user's own: the snapshot is sent if --task names one."""
    SEVERAL = auto()
    """It only tells something, and may ask several clusters at once."""
    JOB_OUTPUT = auto()
    """Its job writes the file --output, or one that is named after the data: it is fetched when
    --follow has seen the end of the job."""
