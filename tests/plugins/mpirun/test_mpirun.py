"""Jobs by real mpiruns, Intel's and Open MPI's, on two hosts that both are this machine."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.cluster import cleanup
from slurmft.cluster.local import LocalNodes
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.files import write_json
from slurmft.plugins.mpirun import rank as mpi_rank
from slurmft.plugins.mpirun.launcher import (
    choose_program,
    fabric_variables,
    hosts_of,
    read_hostfile,
    session_folders,
    starter,
    starter_variables,
)
from slurmft.plugins.mpirun.rank import Place, own_name
from slurmft.runs import attempts
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from tests.conftest import HOSTILE, Done, Following, assert_two_lines, slurmft
from tests.support.ccl import stand_in, torch_version
from tests.support.cluster import Cluster
from tests.support.made_runs import write_run
from tests.support.own_programs import PLACES, write
from tests.train.test_resume import assert_same, held, rank_pids, states, steps_twice
from tests.train.test_trainer import assert_gone, emotion

pytestmark = pytest.mark.processes

DIALECTS = {"intel": "mpiexec.hydra", "openmpi": "mpirun.openmpi"}
FLAGS = (
    "--precision",
    "fp32",
    "--log-every",
    "1",
    "--learning-rate",
    "1e-3",
    "--batch-size",
    "2",
)
EPOCHS = (
    "--epochs",
    "3",
    "--eval-batch-size",
    "8",
    "--nodes",
    "2",
    "--nproc-per-node",
    "1",
)

SSH = """\
#!/bin/bash
# ssh [options] HOST COMMAND...: every host is this machine
while [[ $1 == -* ]]; do shift; done
[ "$1" = 127.0.0.9 ] && { echo "ssh: connect to host $1: No route to host" >&2; exit 255; }
shift
exec bash -c "$*"
"""


OPENMPI = pytest.param("openmpi", marks=pytest.mark.extra("mpi"))
Mpi = tuple[str, dict[str, str]]

SSH_TO_NODES = f"""\
#!{sys.executable}
# ssh [options] HOST COMMAND...: to the nodes of tests/support/cluster
import os, sys
from tests.support.cluster.network import as_host
words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
command = as_host(words[0], ["bash", "-c", " ".join(words[1:])])
os.execvp(command[0], command)
"""


ONLY_INTEL = pytest.mark.parametrize("mpi", ["intel"], indirect=True)


@pytest.fixture(params=["intel", OPENMPI])
def mpi(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mpi:
    """A dialect, and the environment in which its mpirun is found."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    if shutil.which(DIALECTS[request.param], path=path) is None:
        reason = f"{DIALECTS[request.param]} is not installed"
        reason += " (the extra test; Debian's openmpi-bin)"
        assert not request.config.getoption("--slurm"), reason
        pytest.skip(reason)
    # two "hosts" share the cores
    return request.param, {"PATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def hostfile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hosts") / HOSTILE
    path.write_text("# two names of this machine\n127.0.0.1 slots=4\n\n127.0.0.2:4\n")
    return path


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, tiny_data: Path, tiny_model: Path
) -> Done:
    """The same run on simulated nodes, by torchrun."""
    runs = (
        "--runs-dir",
        str(tmp_path_factory.mktemp("undisturbed")),
        "--cluster",
        "local",
    )
    flags = (*FLAGS, *EPOCHS, *runs, *emotion(tiny_data, tiny_model))
    done = slurmft("submit", "--follow", *flags, imported=True)
    assert done.code == 0, done.err
    return done


def start(
    mpi: Mpi, hostfile: Path, runs: Path, *more: str, imported: bool = False
) -> Following:
    """Follows a run by mpirun; if `imported`, only mpirun and its ranks start interpreters."""
    dialect, env = mpi
    where = ("--cluster", "mpirun", "--hostfile", str(hostfile), "--dialect", dialect)
    flags = (*where, "--runs-dir", str(runs), *FLAGS, *EPOCHS, *more)
    return Following(*flags, env=env, imported=imported)


@pytest.mark.extra("mpi")
def test_same_as_by_torchrun(
    mpi: Mpi,
    hostfile: Path,
    undisturbed: Done,
    tmp_path: Path,
    tiny_data: Path,
    tiny_model: Path,
) -> None:
    """Also after a stop by a signal, and a rank that is killed."""
    job = start(
        mpi,
        hostfile,
        tmp_path / HOSTILE,
        *emotion(tiny_data, tiny_model),
        imported=True,
    )
    job.at_step(20)
    os.kill(rank_pids(job.run)[1], signal.SIGUSR2)
    resumed = re.search(r"resumes after step ([\d,]+)", job.until("resumes after step"))
    assert resumed is not None
    # By the records: on the screen a step is up to two seconds late, and the run might have ended.
    job.at_step(int(resumed[1].replace(",", "")) + 3)
    os.kill(rank_pids(job.run)[1], signal.SIGKILL)
    code, text = job.end()
    assert code == 0, text
    assert "was killed by SIGKILL" in str(job.run.history())
    assert states(job.run).count("requeued") == 2
    assert_same(job.run, undisturbed.run)
    assert_gone(job.run)


def test_own_program(
    mpi: Mpi, hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are mpirun's, not torchrun's."""
    (folder := tmp_path / HOSTILE).mkdir()
    monkeypatch.chdir(folder)
    write(folder, "places.py", PLACES)
    dialect, env = mpi
    where = ("--cluster", "mpirun", "--hostfile", str(hostfile), "--dialect", dialect)
    flags = (*where, "--nodes", "2", "--nproc-per-node", "2")
    done = slurmft("run", "--follow", *flags, "--", "places.py", env=env)
    assert done.code == 0, done.err
    found = [done.run.rank_log(rank).read_text().split()[-6:] for rank in range(4)]
    assert [place[:4] for place in found] == [
        [str(n), str(n % 2), "4", "2"] for n in range(4)
    ]
    assert len({(address, port) for *_, address, port in found}) == 1
    refused = slurmft("run", *flags, "--per", "node", "--", "places.py", env=env)
    assert_two_lines(refused, "--per node")


RECORDS_ENVIRONMENT = """\
#!/bin/bash
env >{folder}/environment
stat --format %a "${{@: -1}}"/.secrets.* >{folder}/mode
exec {mpirun} "$@"
"""


@ONLY_INTEL
def test_secrets_go_by_no_mpirun(mpi: Mpi, hostfile: Path, tmp_path: Path) -> None:
    """Hydra sends its environment to whoever connects first in the place of its proxy."""
    dialect, env = mpi
    (bin_folder := tmp_path / "bin").mkdir()
    mpirun = shutil.which(DIALECTS[dialect], path=env["PATH"])
    recorder = bin_folder / DIALECTS[dialect]
    recorder.write_text(RECORDS_ENVIRONMENT.format(folder=tmp_path, mpirun=mpirun))
    recorder.chmod(0o755)
    program = tmp_path / "token.py"
    program.write_text("import os; print('has', os.environ['HF_TOKEN'])")
    env = env | {"PATH": f"{bin_folder}:{env['PATH']}", "HF_TOKEN": "word-of-the-user"}
    where = ("--cluster", "mpirun", "--hostfile", str(hostfile), "--dialect", dialect)
    flags = (*where, "--nodes", "2", "--nproc-per-node", "1", "--follow")
    runs = ("--runs-dir", str(tmp_path / "runs"))
    done = slurmft("run", *flags, *runs, "--", str(program), env=env)
    assert done.code == 0, done.err
    assert "has word-of-the-user" in done.run.rank_log(1).read_text()
    environment = (tmp_path / "environment").read_text()
    assert "SLURMFT_ATTEMPT=" in environment
    assert "SLURMFT_STORE_SECRET" not in environment
    assert "word-of-the-user" not in environment
    assert (tmp_path / "mode").read_text() == "600\n"
    assert not list(done.run.path.glob(".secrets*"))


def test_secrets_of_a_launcher_that_was_killed_are_left_over(tmp_path: Path) -> None:
    run = write_run(tmp_path / "emotion-20261120-093012-a1b2", state="failed")
    secrets = mpi_rank.secrets_path(run)
    write_json(secrets, {"HF_TOKEN": "word-of-the-user"}, is_private=True)
    assert mpi_rank.SECRETS_NAME.fullmatch(secrets.name)
    (item,) = cleanup.plan(tmp_path, ["leftovers"], 0).items
    assert item.path == secrets


@pytest.mark.extra("mpi")
@ONLY_INTEL
def test_cancel_saves_and_resume_goes_on(
    mpi: Mpi,
    hostfile: Path,
    undisturbed: Done,
    tmp_path: Path,
    tiny_data: Path,
    tiny_model: Path,
) -> None:
    job = start(mpi, hostfile, tmp_path, *emotion(tiny_data, tiny_model))
    job.at_step(20)
    with held(rank_pids(job.run)):
        assert slurmft("cancel", str(job.run.path)).code == 0
    assert job.end()[0] == 5
    assert job.run.checkpoint_names()
    assert "stopping" in states(job.run)
    done = slurmft("resume", str(job.run.path), "--follow", env=mpi[1])
    assert done.code == 0, done.err
    assert steps_twice(job.run) == 0
    assert_same(job.run, undisturbed.run)


JOINS_MPI = """
import ctypes, os, sys, time
from slurmft.job import process
ctypes.CDLL(f"{sys.prefix}/lib/libmpi.so.12").MPI_Init(None, None)
time.sleep(3 * (os.environ["PMI_RANK"] == "0"))
print("done", flush=True)
process.end(0)
"""


@ONLY_INTEL
def test_rank_that_joined_mpi_may_end_first(mpi: Mpi) -> None:
    """mpirun kills the others if one goes without a word, as oneCCL's would have."""
    command = ["mpiexec.hydra", "-n", "2", sys.executable, "-c", JOINS_MPI]
    env = os.environ | mpi[1] | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        command, env=env, timeout=120, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "done\ndone\n"), ran.stdout + ran.stderr


@pytest.mark.extra("mpi")
@ONLY_INTEL
def test_oneccl_over_mpi(mpi: Mpi, hostfile: Path, tmp_path: Path) -> None:
    env = mpi[1] | stand_in(tmp_path / "lib", torch_version())
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], *sys.path])
    flags = ("--backend", "ccl", "--max-steps", "4")
    job = start((mpi[0], env), hostfile, tmp_path / "runs", *flags)
    code, text = job.end()
    assert code == 0, text
    assert "made by the stand-in" in job.run.rank_log(1).read_text()
    assert states(job.run)[-1] == "finished"


@pytest.mark.extra("mpi")
@ONLY_INTEL
def test_mpi_says_why_it_ends_the_ranks(
    mpi: Mpi, hostfile: Path, tmp_path: Path
) -> None:
    env = (
        mpi[1]
        | stand_in(tmp_path / "lib", torch_version())
        | {"FI_PROVIDER": "none-such"}
    )
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], *sys.path])
    flags = ("--backend", "ccl", "--max-steps", "4", "--max-requeues", "0")
    job = start((mpi[0], env), hostfile, tmp_path / "runs", *flags)
    code, text = job.end()
    assert code != 0
    said = r"MPI ended it: Fatal error in [^\n]*: OFI fi_getinfo\(\) failed[^\n]*\(rank [01]\)"
    assert re.search(said, text), text


@pytest.mark.parametrize("mpi", [OPENMPI], indirect=True)
def test_rank_that_hangs(
    mpi: Mpi,
    hostfile: Path,
    tmp_path: Path,
    tiny_data: Path,
    tiny_model: Path,
) -> None:
    flags = ("--hang-timeout-s", "5", "--checkpoint-every-steps", "10")
    job = start(mpi, hostfile, tmp_path, *flags, *emotion(tiny_data, tiny_model))
    job.at_step(20)
    os.kill(rank_pids(job.run)[1], signal.SIGSTOP)
    code, text = job.end()
    assert code == 0, text
    assert "hangs: no step for" in str(job.run.history())
    assert job.run.stacks(1).exists()
    assert_gone(job.run)


def test_error_of_a_rank_ends_the_job(mpi: Mpi, hostfile: Path, tmp_path: Path) -> None:
    job = start(mpi, hostfile, tmp_path, "--interface", "ib9")
    code, text = job.end()
    assert code == 4
    assert "has no network interface 'ib9'" in text
    assert_gone(job.run)


def test_host_that_cannot_be_reached(mpi: Mpi, tmp_path: Path) -> None:
    """mpirun's own words, and what to try."""
    (tmp_path / "hosts").write_text("127.0.0.1\n127.0.0.9\n")
    job = start(mpi, tmp_path / "hosts", tmp_path)
    code, text = job.end()
    assert code != 0
    assert "mpirun started no rank" in text
    assert "try `ssh HOST true`" in text
    assert states(job.run)[-1] == "failed"


@pytest.mark.extra("mpi")
def test_two_ranks_a_host(mpi: Mpi, hostfile: Path, tmp_path: Path) -> None:
    dialect, env = mpi
    where = (
        "--hostfile",
        str(hostfile),
        "--dialect",
        dialect,
        "--runs-dir",
        str(tmp_path),
    )
    sizes = (
        "--nodes",
        "2",
        "--nproc-per-node",
        "2",
        "--max-steps",
        "2",
        "--batch-size",
        "2",
    )
    done = slurmft("submit", "--cluster", "mpirun", "--follow", *where, *sizes, env=env)
    assert done.code == 0, done.err
    assert done.result["world_size"] == 4


def test_dry_run_starts_nothing(mpi: Mpi, hostfile: Path, tmp_path: Path) -> None:
    where = (
        "--cluster",
        "mpirun",
        "--hostfile",
        str(hostfile),
        "--runs-dir",
        str(tmp_path),
    )
    flags = ("--dialect", mpi[0], "--nodes", "2", "--nproc-per-node", "3")
    secret = {"HF_TOKEN": "hf_secret"}
    done = slurmft("submit", "--dry-run", *where, *flags, env=mpi[1] | secret)
    assert done.code == 0, done.err
    assert "hf_secret" not in done.out
    assert re.search(r"-n 6 (-ppn|-N) 3 ", done.out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slurm
def test_hosts_of_their_own(mpi: Mpi, idle_cluster: Cluster, tmp_path: Path) -> None:
    """Each with its own network, address and name, and none of them this one."""
    dialect, env = mpi
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(SSH_TO_NODES)
    (folder / "ssh").chmod(0o755)
    env = env | {
        "PATH": f"{folder}:{env['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    (tmp_path / "hosts").write_text("".join(f"{host}\n" for host in idle_cluster.hosts))
    where = (
        "--cluster",
        "mpirun",
        "--hostfile",
        str(tmp_path / "hosts"),
        "--dialect",
        dialect,
    )
    flags = (
        "--nodes",
        "2",
        "--nproc-per-node",
        "1",
        "--max-steps",
        "2",
        "--eval-batch-size",
        "64",
    )
    command = [sys.executable, "-m", "slurmft", "submit", "--follow", *where, *flags]
    command += ["--runs-dir", str(tmp_path / "runs"), "--batch-size", "2"]
    done = idle_cluster.run(command, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    ranks = json.loads((run / "environment.json").read_text())["ranks"]
    assert [rank["host"] for rank in ranks] == idle_cluster.hosts[:2]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@ONLY_INTEL
def test_ranks_that_mpi_binds(mpi: Mpi, tmp_path: Path, hostfile: Path) -> None:
    """As a published text has it: each rank computes on the cores of its own domain."""
    _, env = mpi
    done = slurmft(
        *("submit", "--cluster", "mpirun", "--hostfile", str(hostfile), "--follow"),
        *("--nodes", "1", "--nproc-per-node", "2", "--max-steps", "2"),
        *("--eval-batch-size", "64", "--runs-dir", str(tmp_path), *FLAGS),
        env=env | {"I_MPI_PIN_DOMAIN": "[0x1,0x2]"},
    )
    assert done.code == 0, done.err
    ranks = json.loads(done.run.environment.read_text())["ranks"]
    assert [rank["cores"] for rank in ranks] == ["0", "1"]


@pytest.mark.slurm
@ONLY_INTEL
def test_within_a_job_of_slurm_without_ssh(
    mpi: Mpi, idle_cluster: Cluster, tmp_path: Path
) -> None:
    """Intel's mpiexec.hydra starts the ranks by srun, as its mpirun does."""
    _, env = mpi
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text("#!/bin/sh\nexit 255\n")
    (folder / "ssh").chmod(0o755)
    env = env | {
        "PATH": f"{folder}:{env['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    (tmp_path / "hosts").write_text("".join(f"{host}\n" for host in idle_cluster.hosts))
    command = ["salloc", "--nodes=2", "--nodelist=n1,n2", "--exclusive", "--time=5"]
    command += [sys.executable, "-m", "slurmft", "submit", "--follow"]
    command += ["--cluster", "mpirun", "--hostfile", str(tmp_path / "hosts")]
    command += ["--nodes", "2", "--nproc-per-node", "1", "--max-steps", "2"]
    command += ["--eval-batch-size", "64", "--runs-dir", str(tmp_path / "runs"), *FLAGS]
    done = idle_cluster.run(command, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    ranks = json.loads((run / "environment.json").read_text())["ranks"]
    assert [rank["host"] for rank in ranks] == idle_cluster.hosts[:2]


# --- without mpirun -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment",
    [
        "PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2",
        "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 "
        "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMI_RANK=0",
    ],
)
def test_place(environment: str) -> None:
    found = dict(pair.split("=") for pair in environment.split())
    assert Place.of(found) == Place(rank=5, size=8, local_rank=1, local_size=2)


def test_no_place() -> None:
    with pytest.raises(SlurmftError, match="neither OMPI_COMM_WORLD_RANK nor PMI_RANK"):
        Place.of({"PMI_RANK": "0", "PMI_SIZE": "1"})


def test_own_name() -> None:
    """mpirun may begin with another host than the list."""
    assert own_name(["192.0.2.77", "127.0.0.1"], 0) == "127.0.0.1"
    assert own_name(["127.0.0.1", "127.0.0.2"], 1) == "127.0.0.2"
    # Behind an address translation.
    assert own_name(["192.0.2.77", "192.0.2.78"], 1) == "192.0.2.78"


@pytest.mark.parametrize(
    ("text", "nodes", "words"),
    [
        (None, 1, "cannot be read: No such file"),
        ("", 1, "names no host"),
        ("# n1\n", 1, "names no host"),
        ("127.0.0.1\n", 2, "--nodes 2, but"),
    ],
)
def test_hostfiles_that_cannot_be_right(
    text: str | None, nodes: int, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(words)):
        hosts_of(
            JobConfig(cluster="mpirun", nodes=nodes, plugins={"hostfile": str(path)})
        )


def test_no_such_user_in_a_path(tmp_path: Path) -> None:
    done = slurmft("submit", "--cluster", "mpirun", "--hostfile", "~no-such-user/hosts")
    assert (done.code, done.out) == (2, "")
    assert "~no-such-user/hosts' cannot be read: No such file" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("version", "program"),
    [
        ("mpirun (Open MPI) 5.0.3", "mpirun"),
        ("mpirun.openmpi (OpenRTE) 4.1.4", "mpirun"),
        ("HYDRA build details:\n  Configure options: CFLAGS=-fopenmp", None),
        ("Intel(R) MPI Library for Linux* OS", None),
    ],
)
def test_whose_mpirun_it_is(
    version: str, program: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho '{version}'\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if program is None:
        with pytest.raises(UsageError, match="no mpirun of Open MPI"):
            choose_program("openmpi")
    else:
        assert choose_program("openmpi") == ("openmpi", str(tmp_path / program))


def test_fabric_beside_intels_mpi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pip and conda install it. What the user has set stays."""
    for name in ("I_MPI_OFI_LIBRARY", "FI_PROVIDER_PATH"):
        monkeypatch.delenv(name, raising=False)
    program = str(tmp_path / "bin" / "mpiexec.hydra")
    assert fabric_variables(program) == {}
    library = tmp_path / "lib" / "libfabric.so.1"
    library.parent.mkdir()
    library.touch()
    both = {"I_MPI_OFI_LIBRARY": str(library), "FI_PROVIDER_PATH": str(library.parent)}
    assert fabric_variables(program) == both
    monkeypatch.setenv("FI_PROVIDER_PATH", "/opt/providers")
    assert fabric_variables(program) == {"I_MPI_OFI_LIBRARY": str(library)}
    monkeypatch.setenv("I_MPI_OFI_LIBRARY", "/opt/libfabric.so")
    assert fabric_variables(program) == {}


def test_tasks_of_slurm_are_not_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an allocation of tasks with a CPU each, mpirun's ranks have them all."""
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    monkeypatch.setattr(mpi_rank, "run_task", lambda run_dir, task: None)
    for name in ("PMI_RANK", "MPI_LOCALRANKID"):
        monkeypatch.setenv(name, "0")
    for name in ("PMI_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.setenv(name, "1")
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    mpi_rank.main(["run"])
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert "SLURM_CPUS_PER_TASK" not in os.environ


def test_killed_task_has_the_code_that_srun_gives(tmp_path: Path) -> None:
    """128 + the signal: the job goes on after that, also before its first checkpoint."""
    job = JobConfig(runs_dir=str(tmp_path))
    run = RunDir.create(RunConfig(program=TrainConfig.resolve().program(), job=job))
    nodes = LocalNodes(run)
    nodes.tasks = [subprocess.Popen(["sh", "-c", "kill -KILL $$"])]
    code = nodes._wait()
    assert code == 128 + signal.SIGKILL
    attempts.begin(run, ["n1"], "1")
    assert attempts.decide(run, code).state == "requeued"


def test_no_room_for_the_sessions_of_open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, mode: int = 0o777) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "mkdir", full)
    environment: dict[str, str] = {}
    with (
        pytest.raises(SlurmftError, match="no sessions in /tmp: No space") as error,
        session_folders("mpirun", environment),
    ):
        pass
    assert "PRTE_MCA_prte_tmpdir_base=DIR" in (error.value.hint or "")
    assert environment == {}


def test_hostfiles(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n1 slots=2 # fast\n\n#n9\n  n2:2\r\nn3\n")
    assert read_hostfile(str(tmp_path / "hosts")) == ["n1", "n2", "n3"]
    (tmp_path / "hosts").write_text("n1\nn1\nn2\nn2\n")  # as PBS writes it
    assert read_hostfile(str(tmp_path / "hosts")) == ["n1", "n2"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "mpirun"], "--cluster mpirun needs --hostfile"),
        (["--hostfile", "hosts"], "needs --cluster mpirun: Slurm chooses the hosts"),
        (["--cluster", "mpirun", "--hostfile", "{hosts}"], "needs --nproc-per-node"),
        (
            ["--cluster", "mpirun", "--hostfile", "{hosts}", "--nproc-per-node", "1"],
            "the PATH has no mpiexec.hydra and no mpirun of Open MPI",
        ),
    ],
)
def test_mistakes(
    arguments: list[str], words: str, hostfile: Path, tmp_path: Path
) -> None:
    filled = [str(hostfile) if a == "{hosts}" else a for a in arguments]
    runs = ("--runs-dir", str(tmp_path / "runs"))
    done = slurmft("submit", *filled, *runs, env={"PATH": str(tmp_path)})
    assert done.code == 2
    assert words in done.err
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "ssh"),
        ({"SLURM_JOBID": "7", "SLURM_JOB_ID": "7"}, "slurm"),
        ({"PE_HOSTFILE": "/tmp/hosts"}, "sge"),
        ({"PBS_NODEFILE": "/tmp/nodes", "PBS_ENVIRONMENT": "PBS_BATCH"}, "pbs"),
        ({"LSB_JOBID": "3"}, "lsf"),
        ({"SLURM_JOBID": "7", "I_MPI_HYDRA_BOOTSTRAP": "rsh"}, "rsh"),
        ({"SLURM_JOBID": "7", "I_MPI_HYDRA_BOOTSTRAP_EXEC": "/bin/x"}, "ssh"),
    ],
)
def test_starter_of_programs(environment: dict[str, str], expected: str) -> None:
    """As the script mpirun of Intel MPI chooses it."""
    found = starter_variables(JobConfig(), environment)
    assert starter(environment | found) == expected
    # A scheduler does not know the names that a fabric has for its nodes.
    assert starter_variables(JobConfig(host_suffix="-ib0"), environment) == {}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"I_MPI_PIN": "0"}, False),
        ({"I_MPI_PIN": "off"}, False),
        ({"I_MPI_PIN": "1"}, True),
        ({"I_MPI_PIN_DOMAIN": "[0xf0]"}, True),
        ({"I_MPI_PIN": "0", "I_MPI_PIN_DOMAIN": "omp"}, True),
        ({"I_MPI_DEBUG": "5"}, False),
    ],
)
def test_whether_mpi_binds_ranks(environment: dict[str, str], expected: bool) -> None:
    assert mpi_rank.binds_ranks(environment) is expected
