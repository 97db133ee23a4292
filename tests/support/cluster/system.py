"""Processes of this machine: run one, start one for good, find ours among all, kill them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.support import PATIENCE_S, reaping

APT_LINE = "apt-get install -y slurm-wlm slurmdbd munge mariadb-server iproute2"
"""What a Debian machine needs; no service of these packages has to run."""

PROGRAMS = [
    *[
        "slurmctld",
        "slurmd",
        "slurmdbd",
        "srun",
        "sinfo",
        "sacct",
        "sacctmgr",
        "scontrol",
    ],
    *[
        "munged",
        "mariadbd",
        "mariadb-install-db",
        "ip",
        "tc",
        "nsenter",
        "unshare",
        "hostname",
    ],
]

MARK = "SLURMFT_CLUSTER"
"""Environment variable of every daemon that we start: how a later process recognises them."""

SLURM_NAMES = (
    *("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "SCANCEL_"),
    *("SQUEUE_", "SINFO_", "SACCT_"),
)
"""How the names of variables begin that Slurm's commands read."""

POLL_S = 0.03

_children: set[int] = set()


class ClusterError(RuntimeError):
    """What failed, with the value and the cure."""


def require() -> None:
    """Checks that we are root and have the programs.

    Raises:
        ClusterError: with the line to type.
    """
    if os.geteuid() != 0:
        raise ClusterError(
            "the test cluster needs root (network namespaces)\nhint: use sudo"
        )
    with_sbin_on_path()
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise ClusterError(f"programs not found: {' '.join(missing)}\nhint: {APT_LINE}")


def with_sbin_on_path() -> None:
    """Appends the sbin folders to PATH: the daemons live there, and `sudo -u`/cron omit them."""
    here = os.environ.get("PATH", "").split(":")
    more = [d for d in ("/usr/local/sbin", "/usr/sbin", "/sbin") if d not in here]
    os.environ["PATH"] = ":".join([*here, *more])


def sh(*argv: str, stdin: str | None = None, timeout: float = PATIENCE_S) -> str:
    """Runs a program of ours and returns its stdout.

    It carries our mark: when we are killed, it must not go on building what the next `up` removes.

    Raises:
        ClusterError: it failed or took too long.
    """
    return run(
        argv, stdin=stdin, timeout=timeout, env={**os.environ, MARK: argv[0]}
    ).stdout


def run(
    argv: Sequence[str],
    *,
    stdin: str | None = None,
    timeout: float = PATIENCE_S,
    check: bool = True,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a program in a session of its own, all of which is killed when time is up.

    `subprocess.run` kills the child alone and then waits for grandchildren that hold the pipe.
    """
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=cwd,
        env=env,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(stdin, timeout=timeout)
        except subprocess.TimeoutExpired:
            out, err = _end_group(process)
            said = f"{out}{err}".strip()
            text = f"no end after {timeout:g} s: {' '.join(argv)}\nit said: {said}"
            raise ClusterError(text) from None
        except BaseException:
            _end_group(process)
            raise
    done = subprocess.CompletedProcess(list(argv), process.returncode, out, err)
    if check and done.returncode != 0:
        said = f"{out}{err}".strip()
        raise ClusterError(f"exit {done.returncode}: {' '.join(argv)}\nit said: {said}")
    return done


class LoginHost:
    """The host of a Slurm, real or fake, on which tests type commands."""

    @property
    def env(self) -> dict[str, str]:
        """The variables that lead a command to this Slurm."""
        raise NotImplementedError

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = PATIENCE_S,
        check: bool = True,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        on: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the login host, or on the node `on`, as if typed there.

        `env` is added to our environment and the cluster's. What Slurm's commands would take from
        ours is left out: with SLURM_JOB_ID, srun would start a step of the job that runs the tests.

        Raises:
            ClusterError: it failed (unless `check=False`) or took longer than `timeout`.
        """
        full = {k: v for k, v in os.environ.items() if not k.startswith(SLURM_NAMES)}
        full |= {**self.env, **(env or {})}
        return run(
            self._command(argv, on), timeout=timeout, check=check, cwd=cwd, env=full
        )

    def _command(self, argv: Sequence[str], on: str | None) -> Sequence[str]:
        """Returns the command that runs `argv` on the login host, or on the node `on`."""
        raise NotImplementedError


def _end_group(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ends a program and its children, politely first: a killed srun leaves its job behind."""
    for sig, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=patience)
    raise AssertionError("communicate without a timeout returned nothing")


def spawn(argv: Sequence[str], name: str, log: Path, env: Mapping[str, str]) -> int:
    """Starts a daemon that outlives us, marked with its name; returns its pid.

    Not `Popen`: its object complains when the interpreter ends before the child. The signals that
    Python or nohup ignore are set back, or every job of the cluster would inherit them ignored.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    variables = {**os.environ, **env, MARK: name}
    # It outlives a test that starts it again, and does not work in that test's folder.
    variables.pop(reaping.MARK, None)
    argv = ["env", "--chdir=/", *argv]
    pid = os.posix_spawnp(
        argv[0],
        argv,
        variables,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[
            signal.SIGPIPE,
            signal.SIGXFSZ,
            signal.SIGINT,
            signal.SIGQUIT,
            signal.SIGHUP,
            signal.SIGTERM,
        ],
    )
    _children.add(pid)
    return pid


def ended(pid: int) -> bool:
    """Tells whether a daemon that this process spawned has ended."""
    reap()
    return pid not in _children


def reap() -> None:
    """Collects the exit status of dead daemons: as zombies they would still look alive."""
    for pid in tuple(_children):
        try:
            ended, _ = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            ended = pid
        if ended:
            _children.discard(pid)


def pids() -> Iterator[int]:
    """Yields every live process but ourselves."""
    me = os.getpid()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != me:
            yield int(name)


def marked(name: str | None = None) -> set[int]:
    """Finds the processes that carry our mark: the daemon `name`, or all."""
    mark = f"{MARK}={name or ''}".encode()
    found = set()
    for pid in pids():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if line == mark or (name is None and line.startswith(mark)):
                    found.add(pid)
    return found


def inside(namespaces: Iterable[Path]) -> set[int]:
    """Finds the processes that run inside these network namespaces."""
    wanted = set()
    for path in namespaces:
        with contextlib.suppress(OSError):
            wanted.add(_identity(path))
    found = set()
    for pid in pids():
        with contextlib.suppress(OSError):
            if _identity(Path(f"/proc/{pid}/ns/net")) in wanted:
                found.add(pid)
    return found


def _identity(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def argv_of(pid: int) -> list[str]:
    """Returns the command line of a process, empty when it is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [word.decode(errors="replace") for word in raw.split(b"\0") if word]


def kill_until_gone(
    find: Callable[[], set[int]],
    *,
    sig: int = signal.SIGKILL,
    timeout_s: float = PATIENCE_S,
) -> None:
    """Sends the signal once to every process found, and to late comers, until none is left.

    None twice in a row: in the instant of its exec, a process shows no environment.

    Raises:
        ClusterError: with the processes that stay.
    """
    told: set[int] = set()
    deadline = time.monotonic() + timeout_s
    empty = 0
    while empty < 2:
        found = find()
        empty = 0 if found else empty + 1
        for pid in found - told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)
        told |= found
        reap()
        if time.monotonic() > deadline:
            names = "\n".join(
                f"  {pid} {' '.join(argv_of(pid))}" for pid in sorted(found)
            )
            raise ClusterError(
                f"still alive {timeout_s:g} s after signal {sig}:\n{names}"
            )
        time.sleep(POLL_S)
    reap()


def wait_until(
    what: str, ready: Callable[[], bool], timeout_s: float = PATIENCE_S
) -> None:
    """Polls `ready` until it is true.

    Raises:
        ClusterError: it was not within the time.
    """
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout_s:g} s in vain: {what}")
        time.sleep(POLL_S)


def listening(port: int, pid: int | str = "self") -> bool:
    """Tells whether a TCP port listens in a process's network namespace, without connecting to it.

    A connection that says nothing is logged as an error by the daemons, and counted by MariaDB.
    """
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    return True
    return False
