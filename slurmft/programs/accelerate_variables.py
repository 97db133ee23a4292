"""Prints the variables that `accelerate launch --config_file FILE` would set, as JSON: `PYTHON
accelerate_variables.py FILE`.

The program's own Python runs it, which may not have slurmft: nothing of that is imported.
"""

import json
import os
import sys
import types
from typing import Any

_SET_BY_JOB = {
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "PYTHONPATH",
    "ACCELERATE_CPU_AFFINITY",
}
_USE_CPU = "ACCELERATE_USE_CPU"


# No Exception: nothing in between may catch it.
class _Launched(BaseException):
    """Accelerate would start the program now, with these variables."""


def _launch(*_: Any, env: Any = None, **__: Any) -> None:
    raise _Launched(dict(env or os.environ))


def variables(path: str) -> dict[str, str]:
    """Runs Accelerate's launcher up to the start of the program, of one process."""
    import torch.distributed.run
    from accelerate.commands import launch

    # What Accelerate sets is what differs afterwards.
    before = dict(os.environ)
    # Accelerate starts one process by Popen, several by torchrun: both are caught.
    launch.subprocess = types.SimpleNamespace(Popen=_launch)
    torch.distributed.run.run = _launch
    # How many there are is the job's business: with one, the file's numbers do not count.
    one = "--num_processes 1 --num_machines 1 --machine_rank 0 --main_process_port 0 --gpu_ids all"
    arguments = ["--config_file", path, *one.split(), "program"]
    try:
        launch.launch_command(launch.launch_command_parser().parse_args(arguments))
    except _Launched as launched:
        environment = launched.args[0]
        set_by_job = set(_SET_BY_JOB)
        # Set on nodes whose CPUs compute; on others the file decides.
        if _USE_CPU in before:
            set_by_job.add(_USE_CPU)
        changed = {}
        for name, value in environment.items():
            if before.get(name) != value and name not in set_by_job:
                changed[name] = value
        return changed
    raise ValueError("Accelerate would not start a program with it")


if __name__ == "__main__":
    del sys.path[0]  # its folder has modules of common names
    try:
        print("\n" + json.dumps({"variables": variables(sys.argv[1])}))
    except Exception as error:
        print("\n" + json.dumps({"error": " ".join(str(error).split())}))
