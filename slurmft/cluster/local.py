"""Jobs without Slurm: N simulated nodes on this machine, in one job of submitit's local executor.

submitit runs one process, `python -m slurmft.cluster.local RUN_DIR`, in place of srun: it starts a
task for each node, and when one fails, it ends the others and returns its exit code.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slurmft.cluster.job_state import Report
from slurmft.cluster.ports import ports_of_attempt
from slurmft.cluster.submitit_logging import keeping_logging
from slurmft.core import interpreter, permissions, process, removal
from slurmft.core.config import RunConfig, time_limit_min
from slurmft.core.decode import load
from slurmft.core.errors import (
    Exit,
    SlurmftError,
    UsageError,
    of_system,
    one_line,
    run_main,
)
from slurmft.core.files import (
    UnfitFileError,
    open_to_append,
    read_text,
    write_json,
    write_text,
)
from slurmft.core.run_files import Failure, current_attempt
from slurmft.node import rendezvous, sealed, signals
from slurmft.node.hardware import Gpu, select, visible_gpus
from slurmft.runs import attempts, hung_collective
from slurmft.runs.rundir import RunDir

DESTINATION = "on this machine, without Slurm: {} simulated node(s)"
LOCATION_KIND: Literal["host"] = "host"
STARTS_RANKS = False

_KILL_AFTER_S = 20
"""Between SIGTERM and SIGKILL to the other nodes when one has failed."""
_SETUP = "SLURMFT_SETUP"
"""Variable with the shell lines that a job begins with. Not a file of the run: where others can
rename runs, it could be another one by the time that it is executed."""
_RUN_SETUP = (
    f'lines=${_SETUP}; unset {_SETUP}; set -e; eval "$lines"; set +e; exec "$@"'
)
_TIME_LIMIT = signal.SIGUSR2
"""What submitit's local controller sends shortly before the time limit."""
_STOPS = ("CANCELLED", "TIMEOUT")
"""States of jobs that were stopped, as Slurm calls them; such a job leaves an empty file of the
name."""


@dataclass(frozen=True)
class Process:
    """A process of a job: the one that runs it (pid.json), and submitit's controller, which starts
    that (controller.json). A later process of that number, or one of another host or boot, has
    another start."""

    pid: int
    started: str
    """In clock ticks since boot."""
    boot: str
    """The id of that boot."""

    @classmethod
    def of(cls, pid: int) -> "Process | None":
        """Returns a process that runs; None for one that has ended, or a zombie."""
        fields = process.stat(pid)
        if fields is None or fields[0] == "Z":
            return None
        boot = read_text(_BOOT_ID).strip()
        # Field 22 of proc(5), starttime: these begin with the third.
        return cls(pid, fields[19], boot)

    def is_alive(self) -> bool:
        return self == Process.of(self.pid)


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LocalNodes:
    """Starts and watches the tasks of all nodes, as srun does on a cluster."""

    PLACE = "on this machine"
    """Where the next attempt begins, in words."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.gpus = visible_gpus(os.environ)
        """The nodes share out the GPUs."""
        self.tasks: list[subprocess.Popen[bytes]] = []
        self.stopped_by = 0
        """The signal that ends the job: SIGTERM by `slurmft cancel`, or the time limit's."""

    def __call__(self) -> int:
        """Runs all nodes, again after a stop or a crash; returns the exit code. Refuses a run that
        others can write, and one that another job has.

        A stop signal to one of the nodes is what preemption is on a cluster: the run resumes.
        """
        signals.block()
        run = self.run
        permissions.settle(run.join().job.share_with_group)
        signals.listen(self._on_stop)
        attempts.check_turn(run, str(os.getpid()))
        pid = os.getpid()
        # Only now: of two jobs of a run `check_turn` lets one pass, whose file this is.
        write_json(_pid_file(run), Process.of(pid))
        while True:
            try:
                code = self._attempt(run)
            except OSError as error:
                self._record(of_system(error))
                raise
            except SlurmftError as error:
                self._record(error)
                raise
            outcome = self._outcome(run, code)
            if outcome.state != "requeued":
                self._note_stop(code)
                attempts.end(run, outcome)
                return int(outcome.code)
            attempts.start_again(run, outcome.reason, self.PLACE)

    def _note_stop(self, code: int) -> None:
        """Leaves what has stopped the job: on a full disk its end finds no room."""
        if not code or not self.stopped_by:
            return
        name = "CANCELLED"
        if self.stopped_by == _TIME_LIMIT:
            name = "TIMEOUT"
        _leave_note(self.run, name)

    def _record(self, error: SlurmftError) -> None:
        """Records what kept an attempt from its start, where that has not recorded it itself."""
        if not self.run.get_state().has_ended:
            self.run.add(Failure.of("the job", error))
            outcome = attempts.Outcome("failed", error.message, error.code)
            attempts.end(self.run, outcome)

    def _attempt(self, run: RunDir) -> int:
        nodes = run.load_config().job.nodes
        hosts = [rendezvous.simulated_host(node) for node in range(nodes)]
        attempts.begin(run, hosts, str(os.getpid()))
        # Looked for at each attempt: what was free before may be taken now.
        ports = ports_of_attempt(run)
        shared = {
            rendezvous.HOSTS: ",".join(hosts),
            rendezvous.PORT_VARIABLE: ",".join(map(str, ports)),
            sealed.SECRET: sealed.new_secret(),
        }
        self.tasks = []
        for node in range(nodes):
            # Every so-many-th: a remainder is spread over the nodes.
            gpus_of_node = self.gpus[node::nodes]
            self.tasks.append(self._start(node, shared, gpus_of_node))
        return self._wait()

    def _outcome(self, run: RunDir, code: int) -> attempts.Outcome:
        """Decides what becomes of the run after an attempt; a cancelled job ends for good."""
        saved = ""
        if code == Exit.STOPPED:
            saved = f"; {attempts.saved(run)}"
        # A stop comes before the failures that it may have caused.
        if code and self.stopped_by == _TIME_LIMIT:
            reason = f"the time limit (--time) was reached{saved}"
            final_code = Exit.FAILED
            if saved:
                final_code = Exit.STOPPED
            return attempts.Outcome("failed", reason, final_code)
        if code and self.stopped_by:
            return attempts.Outcome("cancelled", f"cancelled{saved}", Exit.CANCELLED)
        hung_collective.record(run, current_attempt())
        return attempts.decide(run, code)

    def _start(
        self, node: int, shared: dict[str, str], gpus: Sequence[Gpu]
    ) -> subprocess.Popen[bytes]:
        number = {rendezvous.LOCAL_NODE: str(node)}
        environment = os.environ | shared | number | select(gpus)
        command = interpreter.module("slurmft.node.task", str(self.run.path))
        with open_to_append(self.run.logs / f"task-{node:03d}.log") as log:
            # A session of its own, so that a signal reaches the node as srun would send it: whole.
            return process.start(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def _wait(self) -> int:
        """Waits for all tasks, ending the others when one fails; returns the failure's code."""
        code = 0
        deadline: float | None = None
        lead_s = self.run.load_config().job.lead_s
        while any(task.poll() is None for task in self.tasks):
            # The first failure counts: the others follow from it.
            if not code:
                code = self._failure()
            if (code or self.stopped_by) and deadline is None:
                kill_after_s = _KILL_AFTER_S
                # A stop, not a failure: the ranks save.
                if not code:
                    kill_after_s = max(kill_after_s, lead_s)
                deadline = time.monotonic() + kill_after_s
                self._signal(signal.SIGTERM)
            if deadline is not None and time.monotonic() > deadline:
                self._signal(signal.SIGKILL)
            time.sleep(0.05)
        return code or self._failure()

    def _failure(self) -> int:
        """Returns the exit code of the first task that failed, as srun has it: 128 + a signal;
        0: none."""
        for task in self.tasks:
            code = task.poll()
            if code and code < 0:
                return 128 - code
            if code:
                return code
        return 0

    def _signal(self, sig: signal.Signals) -> None:
        for task in self.tasks:
            if task.poll() is None:
                os.killpg(task.pid, sig)

    def _on_stop(self, signum: int, sender: int) -> None:
        self.stopped_by = self.stopped_by or signum


def location() -> str:
    """Returns the name of this host: only here can a process be asked about."""
    return os.uname().nodename


def plan(config: RunConfig, run: RunDir) -> str:
    """Returns a comment: there is no script."""
    return (
        f"# no Slurm: {config.job.nodes} simulated node(s) on this machine, each with a task of\n"
        "# its own, in one job of submitit's local executor\n"
    )


def submit(config: RunConfig, run: RunDir) -> str:
    """Starts the job in the background; returns its id, which is its process id. UsageError where
    there are fewer GPUs than simulated nodes."""
    gpus = visible_gpus(os.environ)
    if 0 < len(gpus) < config.job.nodes:
        raise UsageError(
            f"--nodes {config.job.nodes} simulated nodes, but this machine has {len(gpus)} GPU(s)",
            f"use --nodes {len(gpus)}, or hide the GPUs: CUDA_VISIBLE_DEVICES= slurmft submit ...",
        )
    return start(config, run, __name__)


def start(config: RunConfig, run: RunDir, module: str) -> str:
    """Starts a module with the run directory on this machine, in the background; returns the job's
    id, its process id."""
    with keeping_logging():
        import submitit
    forget_processes(run)  # of the job before, where this is a resume

    class Executor(submitit.LocalExecutor):  # type: ignore[misc, unused-ignore]
        """submitit's executor, with bash for the setup lines, as on Slurm, and with a controller
        that no signal to this command reaches."""

        @property
        def _submitit_command_str(self) -> str:
            command = interpreter.module(module, str(run.path), unbuffered=True)
            # The controller has another PYTHONPATH, which is not to be that of the program.
            in_bash = ["bash", "-c", _RUN_SETUP, "setup", *command]
            return shlex.join(interpreter.with_path_of(dict(os.environ), in_bash))

        def _submit_command(self, command: str) -> Any:
            controller = _start_controller(config, run, command)
            return self.job_class(self.folder, str(controller.pid), process=controller)

        @classmethod
        def name(cls) -> str:
            return "local"

    executor = Executor(run.submitit)
    job = executor.submit(os.getpid)  # its pickle: the command loads none
    note_controller(run, int(job.job_id))
    return str(job.job_id)


def forget_processes(run: RunDir) -> None:
    """Forgets the processes of the job before, and what has stopped it."""
    notes = [_note_file(run, name) for name in _STOPS]
    for file in (_pid_file(run), _controller_file(run), *notes):
        removal.discard(file, removal.exactly(file.name))


def note_controller(run: RunDir, pid: int) -> None:
    """Records the process that a job begins with; none that has ended by now."""
    controller = Process.of(pid)
    if controller is not None:
        # The job runs: a disk that is full must not lose its id.
        run.tell(_controller_file(run), controller, f"the job is process {pid}")


def _start_controller(
    config: RunConfig, run: RunDir, command: str
) -> subprocess.Popen[bytes]:
    """Starts submitit's controller, which runs a command as the job.

    submitit itself would start it in the group of this process, which a terminal, `timeout` and
    other managers signal as a whole; and without GPUs.
    """
    limit_min = time_limit_min(config.job.time or "unlimited")
    variables = {
        "NTASKS": 1,
        "COMMAND": command,
        "TIMEOUT_S": int(60 * limit_min),
        # The controller signals so long before the limit, as sbatch's --signal does.
        "SIGNAL_DELAY_S": config.job.lead_s,
        "NODEID": 0,
        "JOB_NUM_NODES": 1,
        # The id of the job is that of the controller itself.
        "WITH_SHELL": "",
    }
    environment = interpreter.library_environment(dict(os.environ))
    environment["SUBMITIT_EXECUTOR"] = "local"
    environment["SUBMITIT_STDERR_TO_STDOUT"] = ""
    for name, value in variables.items():
        environment[f"SUBMITIT_LOCAL_{name}"] = str(value)
    environment[_SETUP] = "\n".join(config.job.setup)
    with open_to_append(_job_log(run)) as log:
        return subprocess.Popen(
            interpreter.module("submitit.local._local", str(run.submitit)),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_ignore_hangups,
        )


def _ignore_hangups() -> None:
    """Lets no end of a terminal or a session reach what this process starts."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def job_state(job_id: str, run: RunDir) -> Report | None:
    """Returns whether the job's process is alive; None for one that has ended as it recorded."""
    try:
        is_alive = _living(run) is not None
    except OSError as error:
        if run.get_state().has_ended:
            return None
        reason = f"{run.submitit} cannot be read: {one_line(error)}"
        return Report(name="UNKNOWN", reason=reason)
    # After the look: an end that is recorded meanwhile is seen.
    has_ended = run.get_state().has_ended
    if is_alive and has_ended:
        return Report(name="COMPLETING")
    if is_alive:
        return Report(name="RUNNING")
    if has_ended:
        return None
    for name in _STOPS:
        if _note_file(run, name).exists():
            return Report(name=name)
    reason = "its process ended without recording why"
    return Report(name="FAILED", reason=reason, exit_code=1)


def cancel(job_id: str, run: RunDir) -> None:
    """Sends SIGTERM to the job's process, which ends the nodes."""
    deadline = time.monotonic() + _KILL_AFTER_S
    while not _pid_file(run).exists() and _living(run) is not None:
        if time.monotonic() > deadline:
            hint = f"log: {_job_log(run)}"
            raise SlurmftError(f"the job {job_id} does not start", hint)
        # It is just starting: before its file is there, nobody knows which process to signal.
        time.sleep(0.05)
    process_of_job = _living(run)
    # It may end between the look and the signal.
    if process_of_job is not None:
        # The job records its end itself, unless its disk is full, or it is killed before.
        _leave_note(run, "CANCELLED")
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_of_job.pid, signal.SIGTERM)


def _job_log(run: RunDir) -> Path:
    """Where setup lines and submitit's controller write."""
    return run.logs / "job.log"


def _pid_file(run: RunDir) -> Path:
    return run.submitit / "pid.json"


def _controller_file(run: RunDir) -> Path:
    return run.submitit / "controller.json"


def _leave_note(run: RunDir, name: str) -> None:
    """Leaves what stops a job, by the name of a file: an empty one needs no room."""
    with contextlib.suppress(OSError):
        write_text(_note_file(run, name), "")


def _note_file(run: RunDir, name: str) -> Path:
    return run.submitit / name.lower()


def _living(run: RunDir) -> Process | None:
    """Returns the process of a job that runs: until it has begun, submitit's controller.

    Raises:
        OSError: that cannot be read, as while its file system fails.
    """
    for file in (_pid_file(run), _controller_file(run)):
        try:
            recorded = load(file, Process)
        except FileNotFoundError:
            continue
        except (ValueError, UnfitFileError):  # it tells nothing
            return None
        if recorded.is_alive():
            return recorded
        return None
    return None


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: LocalNodes(RunDir.open(sys.argv[1]))()))
