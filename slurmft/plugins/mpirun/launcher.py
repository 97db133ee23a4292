"""Jobs by mpirun, on the hosts of a file: mpirun starts the ranks, without torchrun.

A background process on this machine starts mpirun, again after a stop or a fault. oneCCL runs over
MPI this way.
"""

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from slurmft.cluster import local
from slurmft.cluster.local import LocalNodes
from slurmft.core import filesystem, interpreter, process, removal
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.credentials import holds_secret
from slurmft.core.errors import Exit, SlurmftError, UsageError, run_main
from slurmft.core.files import (
    open_to_append,
    read_bytes,
    read_json,
    read_text,
    write_json,
)
from slurmft.core.run_files import Failure, current_attempt
from slurmft.node import sealed
from slurmft.node.rendezvous import HOSTS
from slurmft.plugins.mpirun import rank
from slurmft.plugins.mpirun.options import MpiOptions
from slurmft.runs import attempts
from slurmft.runs.rundir import RunDir

DESTINATION = "to mpirun: {} node(s)"
LOCATION_KIND = local.LOCATION_KIND
STARTS_RANKS = True

# The job is a process of this host, which starts mpirun: it is asked about as simulated nodes are.
location = local.location
job_state = local.job_state
cancel = local.cancel

_PROGRAMS = {
    "intel": ("mpiexec.hydra",),
    "openmpi": ("mpirun.openmpi", "orterun", "mpirun"),
}
"""Intel's `mpirun` is a script that calls whatever mpiexec.hydra the PATH has."""

_VARIABLES = (
    # the environment of Python
    "PATH",
    "LD_",
    "PYTHON",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "TMPDIR",
    # this program, models and trackers
    "SLURMFT_",
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "HUGGING_FACE_",
    "WANDB_",
    "MLFLOW_",
    "XDG_CACHE_HOME",
    # computing and communication
    "TORCH",
    "OMP_",
    "MKL_",
    "KMP_",
    "CCL_",
    "FI_",
    "I_MPI_",
    "GLOO_",
    "NCCL_",
    "CUDA_",
    "UCX_",
    "DNNL_",
    "ONEDNN_",
    # the way to the hub
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "SSL_CERT_",
    "REQUESTS_CA_BUNDLE",
)
"""How the names of variables begin that Open MPI is to give to ranks on other hosts."""


class MpiRun(LocalNodes):
    """Runs mpirun to its end, again after a stop or a fault."""

    PLACE = "on the same hosts"

    def _attempt(self, run: RunDir) -> int:
        config = run.load_own_config()
        hosts = hosts_of(config.job)
        number = attempts.begin(run, hosts, str(os.getpid()))
        os.environ[sealed.SECRET] = sealed.new_secret()
        command = mpirun_command(config, hosts, str(run.path))
        os.environ.update(fabric_variables(command[0]))
        os.environ.update(starter_variables(config.job, os.environ))
        with (
            session_folders(command[0], os.environ),
            secrets_file(run),
            open_to_append(run.logs / "mpirun.log") as log,
        ):
            # The log has earlier attempts, too: a failed start is explained by what comes now.
            start = log.tell()
            mpirun = process.start(
                command,
                env=without_secrets(os.environ),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            # `LocalNodes` waits for it, and signals it in the end.
            self.tasks = [mpirun]
            code = self._wait()
        if code == Exit.OK:
            # Ranks that stop end with 0: at any other code mpirun kills those that still save.
            return Exit.STOPPED if rank.stopped_marker(run).exists() else Exit.OK
        # The first rank writes its meeting place: that of another attempt means that none began.
        meeting = read_json(run.rendezvous) or {}
        if meeting.get("id") == rank.rendezvous_id(run, number):
            add_abort(run)
        else:
            add_start_failure(run, hosts, code, start, starter(os.environ))
        return code

    def _signal(self, sig: signal.Signals) -> None:
        """A file tells the ranks to stop: mpirun would give them a second to end."""
        if sig == signal.SIGTERM:
            # The first rank looks for it once a second: see `rank._await_stop`.
            rank.stop_marker(self.run).touch()
            name = signal.Signals(self.stopped_by).name
            self.run.set_state("stopping", f"the job received {name}")
        else:
            super()._signal(sig)


@contextlib.contextmanager
def secrets_file(run: RunDir) -> Iterator[None]:
    """Keeps the secrets of this environment in a private file of the run, for the ranks, as long as
    the block lasts.

    They must not go by mpirun: Hydra sends its environment (-genvall) to whoever connects to its
    port first, and all users see the port, in the arguments of its proxies.
    """
    removal.sweep(run.path, rank.SECRETS_NAME)  # of launchers that were killed
    values = {}
    for name, value in os.environ.items():
        if holds_secret(name):
            values[name] = value
    write_json(rank.secrets_path(run), values, is_private=True)
    try:
        yield
    finally:
        removal.sweep(run.path, rank.SECRETS_NAME)


_SESSION_VARIABLES = ("OMPI_MCA_orte_tmpdir_base", "PRTE_MCA_prte_tmpdir_base")
"""Where Open MPI makes its session folders: up to 4, and from 5 on."""


@contextlib.contextmanager
def session_folders(
    program: str, environment: MutableMapping[str, str]
) -> Iterator[None]:
    """Lets Open MPI make its session folders, for the block, below one whose name nobody can guess.

    By itself it takes /tmp/ompi.HOST.UID, whoever has made that, and in the end removes all that is
    in it: also what a link leads to that its maker has put there. What the user has set stays.

    Args:
        program: mpirun; Intel's has no such folders.
        environment: of mpirun.

    Raises:
        SlurmftError: the folder cannot be made.
    """
    is_set = any(name in environment for name in _SESSION_VARIABLES)
    if is_set or Path(program).name in _PROGRAMS["intel"]:
        yield
        return
    # Not TMPDIR: other hosts may have none of that name.
    base = Path("/tmp", f"slurmft-openmpi-{os.geteuid()}-{secrets.token_hex(8)}")
    try:
        base.mkdir(mode=0o700)
    except OSError as error:
        variables = "=DIR ".join((*_SESSION_VARIABLES, ""))
        raise SlurmftError(
            f"Open MPI can keep no sessions in /tmp: {filesystem.reason(error, base)}",
            f"make room there; or name a folder of yours alone: export {variables.strip()}",
        ) from None
    for name in _SESSION_VARIABLES:
        environment[name] = str(base)
    try:
        yield
    finally:
        for name in _SESSION_VARIABLES:
            del environment[name]
        # What is left of an mpirun that was killed stays, as that does in any case.
        removal.discard_empty(base)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if not holds_secret(name)
    }


def add_start_failure(
    run: RunDir, hosts: list[str], code: int, start: int, by: str
) -> None:
    """Records that mpirun ended before any rank had begun, with its own output. `by`: what was to
    start programs on the hosts."""
    if run.root_failure() is not None:
        return
    text = read_bytes(run.logs / "mpirun.log", None)[start:].decode(errors="replace")
    # Open MPI frames its messages by lines of dashes.
    lines = []
    for line in text.splitlines()[:3]:
        if line.strip(" -"):
            lines.append(line.strip())
    reason = "; ".join(lines)
    error = SlurmftError(
        f"mpirun started no rank (exit {code}): {reason}",
        f"log: {run.logs / 'mpirun.log'}; programs on {', '.join(hosts)} were to be started by "
        f"{by}. By ssh it must work without a password: try `ssh HOST true`. Within a job of a "
        "scheduler its own starter needs none: I_MPI_HYDRA_BOOTSTRAP=slurm (pbs, lsf, sge)",
    )
    run.add(Failure.of("mpirun", error))


def add_abort(run: RunDir) -> None:
    """Records why MPI itself ended the ranks, which had no time to: the words are in a rank's log,
    which earlier attempts wrote, too."""
    if run.root_failure(current_attempt()) is not None:
        return
    for path in sorted(run.logs.glob("rank-*.log")):
        log = read_bytes(path, None).decode(errors="replace")
        # in the head of an attempt
        _, _, text = log.rpartition(f", attempt {current_attempt()}, ")
        abort = _ABORT.search(text)
        if abort is None:
            continue
        reason = abort[1]
        _, _, last_line = abort[2].rpartition("\n")
        _, _, innermost = last_line.partition(": ")
        if innermost:
            reason += f": {innermost}"
        number = int(path.stem.partition("-")[2])
        error = SlurmftError(f"MPI ended it: {reason}", f"log: {path}")
        run.add(Failure.of(f"rank {number}", error, retry=True))
        return


_ABORT = re.compile(
    r"^Abort\(\d+\) on node [^:]*: (.*?)(?:, error stack:)?((?:\n\w+\(\d+\)[. ]*:.*)*)$",
    re.M,
)
"""Hydra's MPIs: what failed, and the functions it failed in, the inner ones last."""


def read_hostfile(path: str) -> list[str]:
    """Reads the hosts of a file, in its order, each once: a name a line, as Open MPI
    (`n1 slots=2`), Intel MPI (`n1:2`) or PBS (a line for each core) writes them. The numbers are
    not used."""
    try:
        text = read_text(filesystem.absolute(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        problem = f"--hostfile {path!r} cannot be read: {reason}"
        raise UsageError(problem, "write one host per line") from None
    hosts: dict[str, None] = {}  # an ordered set
    for line in text.splitlines():
        before_comment, _, _ = line.partition("#")
        fields = before_comment.split()
        if fields:
            host, _, _ = fields[0].partition(":")
            hosts[host] = None
    if not hosts:
        problem = f"--hostfile {path!r} names no host"
        raise UsageError(problem, "write one host per line")
    return list(hosts)


def hosts_of(job: JobConfig) -> list[str]:
    """Returns the hosts of a job; UsageError where there is no file, or it has too few."""
    hostfile = job.options_of(MpiOptions).hostfile
    if hostfile is None:
        problem = "--cluster mpirun needs --hostfile"
        raise UsageError(problem, "a file with one host per line")
    if job.min_nodes is not None:
        raise UsageError(
            f"--nodes {job.node_range}: mpirun starts on a fixed number of hosts, the first of "
            "--hostfile",
            f"use --nodes {job.nodes}",
        )
    hosts = read_hostfile(hostfile)
    if len(hosts) < job.nodes:
        raise UsageError(
            f"--nodes {job.nodes}, but --hostfile {hostfile!r} names {len(hosts)} host(s)",
            f"add hosts to it, or use --nodes {len(hosts)}",
        )
    return [host + job.host_suffix for host in hosts[: job.nodes]]


def choose_program(dialect: str) -> tuple[str, str]:
    """Returns mpirun's dialect, and the program that starts ranks; UsageError where the PATH has
    none."""
    dialects = list(_PROGRAMS) if dialect == "auto" else [dialect]
    for candidate in dialects:
        for name in _PROGRAMS[candidate]:
            path = shutil.which(name)
            if path and _speaks(path, candidate):
                return candidate, path
    names = {"intel": "mpiexec.hydra", "openmpi": "mpirun of Open MPI"}
    missing = names.get(dialect, " and no ".join(names.values()))
    raise UsageError(
        f"--cluster mpirun, but the PATH has no {missing}",
        'load the MPI module of your site, or activate its environment (--setup "...")',
    )


def fabric_variables(program: str) -> dict[str, str]:
    """Returns the variables that show Intel MPI the libfabric of its own installation.

    The packages of PyPI and conda (`impi-rt`) install it into the environment's `lib`, where the
    loader does not look, and have no `vars.sh` that would say so. Without it, ranks on several
    hosts end in MPI_Init. What the user has set stays.
    """
    folder = Path(program).parent.parent / "lib"
    library = folder / "libfabric.so.1"
    if "I_MPI_OFI_LIBRARY" in os.environ or not library.exists():
        return {}
    variables = {"I_MPI_OFI_LIBRARY": str(library)}
    if "FI_PROVIDER_PATH" not in os.environ:
        variables["FI_PROVIDER_PATH"] = str(folder)
    return variables


_SCHEDULERS = {
    "SLURM_JOBID": "slurm",
    "PE_HOSTFILE": "sge",
    "PBS_NODEFILE": "pbs",
    "LSB_JOBID": "lsf",
}
"""Variable of a scheduler's job -> name that Hydra has for the scheduler's starter of programs."""


def starter_variables(job: JobConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which Intel's mpiexec.hydra starts programs on the hosts as its
    script `mpirun` would: within a job of a scheduler by the scheduler, where nodes often have no
    ssh between them. What the user has set stays."""
    if any(name.startswith(_BOOTSTRAP) for name in environment):
        return {}
    # A scheduler knows its nodes by their own names alone.
    if job.host_suffix:
        return {}
    for variable, scheduler in _SCHEDULERS.items():
        if environment.get(variable):
            return {_BOOTSTRAP: scheduler}
    return {}


_BOOTSTRAP = "I_MPI_HYDRA_BOOTSTRAP"


def starter(environment: Mapping[str, str]) -> str:
    """Returns the name of what Hydra starts programs on other hosts with."""
    return environment.get(_BOOTSTRAP, "ssh")


def _speaks(path: str, dialect: str) -> bool:
    """Returns whether a program is of the dialect: Intel's has the name `mpirun`, too."""
    if dialect == "intel":
        return True
    version = process.output([path, "--version"], 30) or ""
    return bool(re.search(r"open ?mpi|openrte|open-mpi\.org", version, re.IGNORECASE))


def mpirun_command(config: RunConfig, hosts: list[str], run_dir: str) -> list[str]:
    """Returns the mpirun command of a run; UsageError where there is no mpirun, or no number of
    ranks per node."""
    job = config.job
    if job.nproc_per_node is None:
        raise UsageError(
            "--cluster mpirun needs --nproc-per-node: slurmft cannot detect it on the hosts",
            "use the number of GPUs of a node, or of its CPU sockets",
        )
    dialect, program = choose_program(job.options_of(MpiOptions).dialect)
    options = _intel if dialect == "intel" else _openmpi
    command = interpreter.module(
        "slurmft.plugins.mpirun.rank", run_dir, unbuffered=True
    )
    return [program, *options(hosts, job.nproc_per_node), *command]


def _intel(hosts: list[str], nproc: int) -> list[str]:
    """Returns Hydra's options. It passes on the whole environment that it is started with."""
    all_hosts = ",".join(hosts)
    rank_count = len(hosts) * nproc
    options = ["-hosts", all_hosts, "-n", str(rank_count)]
    options += ["-ppn", str(nproc), "-genvall"]
    # Under a scheduler, -ppn counts only with this.
    options += ["-genv", "I_MPI_JOB_RESPECT_PROCESS_PLACEMENT", "0"]
    # slurmft binds by the node's profile, unless the user has MPI bind the ranks.
    if not rank.binds_ranks(os.environ):
        options += ["-genv", "I_MPI_PIN", "0"]
    return [*options, "-genv", HOSTS, all_hosts]


def _openmpi(hosts: list[str], nproc: int) -> list[str]:
    """Returns Open MPI's options. Variables are passed by name alone: all users see commands."""
    slots = ",".join(f"{host}:{nproc}" for host in hosts)
    rank_count = len(hosts) * nproc
    options = ["--host", slots, "-n", str(rank_count), "-N", str(nproc)]
    options += ["--bind-to", "none"]  # slurmft binds by the node's profile
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    # By itself, Open MPI passes only its own variables on to other hosts.
    for variable in sorted(without_secrets(os.environ)):
        if variable.upper().startswith(_VARIABLES):
            options += ["-x", variable]
    all_hosts = ",".join(hosts)
    return [*options, "-x", f"{HOSTS}={all_hosts}"]


def plan(config: RunConfig, run: RunDir) -> str:
    """Returns the mpirun command, with its title."""
    hosts = hosts_of(config.job)
    command = shlex.join(mpirun_command(config, hosts, str(run.path)))
    title = "# a process on this machine runs, again after a stop or a fault"
    by = starter(os.environ | starter_variables(config.job, os.environ))
    note = f"# Intel's mpirun starts programs on the hosts by {by} ({_BOOTSTRAP})"
    return f"{title}\n{command}\n{note}\n"


def submit(config: RunConfig, run: RunDir) -> str:
    """Starts mpirun in the background; returns the id of the process that does."""
    # The same command as the background process makes, where nobody would see its errors.
    mpirun_command(config, hosts_of(config.job), str(run.path))
    return local.start(config, run, __name__)


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: MpiRun(RunDir.open(sys.argv[1]))()))
