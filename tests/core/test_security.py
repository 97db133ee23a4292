"""Who can read a run, what of others is refused, and where credentials must not be."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmft.cluster import launcher
from slurmft.cluster.submit import provenance
from slurmft.core import credentials, files, hooks, permissions
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.run_files import Failure
from slurmft.node import rendezvous
from slurmft.node.rendezvous import Rendezvous
from slurmft.programs import submission
from slurmft.runs.rundir import CONFIG, RunDir
from slurmft.train.config import TrainConfig
from slurmft.train.login.configure import configure
from slurmft.train.tasks.sequence import Task
from tests.conftest import assert_two_lines, modes, slurmft
from tests.support import PATIENCE_S
from tests.support.made_runs import write_run

TOKEN = "hf_" + "AbCdEfGhIjKlMnOp" * 2
QUICK = (
    "--max-steps",
    "2",
    "--batch-size",
    "4",
    "--eval-batch-size",
    "512",
    "--precision",
    "fp32",
)


@pytest.fixture(autouse=True)
def keep_umask() -> object:
    old = os.umask(0o022)
    yield
    os.umask(old)


# --- who may read ---------------------------------------------------------------------------------


@pytest.mark.extra("caches")
def test_run_of_a_group_with_a_token(tmp_path: Path) -> None:
    """All that login node, task, ranks and submitit write can be read by the group, under a umask
    that lets everybody write. The token comes to the processes by the environment: no file of the
    run has it, no output, and no argument of a process."""
    os.umask(0)
    runs, seen = tmp_path / "runs", tmp_path / "seen"
    setup = f'echo "$HF_TOKEN" | sha256sum >{seen}; ps axww -o args >{seen}.ps'
    where = ("--cluster", "local", "--nproc-per-node", "1", "--runs-dir", str(runs))
    flags = ("--share-with-group", "--setup", setup)
    done = slurmft(
        "submit", "--follow", *where, *QUICK, *flags, env={"HF_TOKEN": TOKEN}
    )
    assert done.code == 0, done.err
    assert done.run.model.exists()
    assert stat.S_IMODE(runs.stat().st_mode) == 0o755
    assert seen.read_text().startswith(
        hashlib.sha256(f"{TOKEN}\n".encode()).hexdigest()
    )
    assert TOKEN not in Path(f"{seen}.ps").read_text() + done.out + done.err
    paths = [p for p in done.run.path.rglob("*") if p.is_file()]
    assert not [p for p in paths if TOKEN.encode() in p.read_bytes()]
    assert modes(done.run.path) == {"folders": {0o2750}, "files": {0o640}}


def test_folder_keeps_the_group_of_a_project(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    permissions.make_folder(tmp_path / "run", share_with_group=False)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o2700
    with files.new_folder(tmp_path / "model") as model:
        (model / "file").touch()
    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == 0o2755


@pytest.mark.extra("studies")
@pytest.mark.processes
def test_studies_are_private(tmp_path: Path) -> None:
    os.umask(0)
    study = tmp_path / "s.toml"
    study.write_text(
        'name = "s"\nscaling = "weak"\n[fixed]\nmax_steps = 1\n[grid]\nnodes = [1]\n'
    )
    folder = tmp_path / "studies"
    done = slurmft("study", "run", str(study), "--studies-dir", str(folder), "--cluster", "local",
                   "--nproc-per-node", "1", *QUICK[2:], imported=True)  # fmt: skip
    assert done.code == 0, done.err
    # its runs, too
    assert modes(folder / "s") == {"folders": {0o700}, "files": {0o600}}


# --- what nobody else can have written ------------------------------------------------------------


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    path = folder / "config.json"
    path.write_text("ours")
    return path


def test_own_file_is_read(own_file: Path) -> None:
    assert CONFIG.read(own_file) == b"ours"
    own_file.parent.parent.chmod(0o1777)  # like /tmp
    assert CONFIG.read(own_file) == b"ours"
    own_file.parent.parent.chmod(0o2770)  # like a project's folder
    assert CONFIG.read(own_file) == b"ours"


@pytest.mark.parametrize(
    ("up", "mode"), [(0, 0o620), (0, 0o602), (1, 0o720), (1, 0o1777), (2, 0o777)]
)
def test_file_that_others_can_write(own_file: Path, up: int, mode: int) -> None:
    path = [own_file, *own_file.parents][up]
    path.chmod(mode)
    with pytest.raises(SlurmftError) as error:
        CONFIG.read(own_file)
    assert f"others can write {str(path)!r} (mode {mode:04o})" in str(error.value)
    assert f"chmod {'o-w' if up == 2 else 'go-w'} {path}" in str(error.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose the folder is")
def test_folder_of_root_that_all_can_write(
    own_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is advised to change the mode of a folder that is not theirs."""
    top = own_file.parents[1]
    top.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(SlurmftError) as error:
        CONFIG.read(own_file)
    cure = f"use a folder elsewhere; or ask root (uid 0), who can: chmod o-w {top}"
    assert error.value.hint == cure


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
@pytest.mark.parametrize("up", [0, 1])
def test_file_of_another_user(own_file: Path, up: int) -> None:
    path = [own_file, *own_file.parents][up]
    os.chown(path, 54321, -1)
    with pytest.raises(SlurmftError, match=r"belongs to another user \(uid 54321\)"):
        CONFIG.read(own_file)


def test_file_behind_a_link(own_file: Path) -> None:
    link = own_file.with_name("link.json")
    link.symlink_to(own_file)
    with pytest.raises(SlurmftError, match="is a link"):
        CONFIG.read(link)


@pytest.mark.processes
def test_job_of_a_run_that_others_can_write_refuses(tmp_path: Path) -> None:
    """As submitit starts it: nothing of the run is executed."""
    job = JobConfig(runs_dir=str(tmp_path / "runs"))
    run = RunDir.create(RunConfig(program=TrainConfig.resolve().program(), job=job))
    run.path.chmod(0o777)
    command = [sys.executable, "-m", "slurmft.cluster.local", str(run.path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "refused, as it would decide what runs as" in done.stderr
    assert f"others can write {str(run.path)!r} (mode 0777)" in done.stderr
    assert not run.attempt.exists()


@pytest.mark.processes
def test_job_without_slurm_has_no_thread_that_takes_stop_signals() -> None:
    """As numpy's, which submitit imports: a stop that they took would be lost."""
    code = (
        "import os, sys, slurmft.plugins.mpirun.launcher\n"
        "print([name for name in ('numpy', 'submitit') if name in sys.modules])\n"
        "print(len(os.listdir('/proc/self/task')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n1\n"


# --- credentials ----------------------------------------------------------------------------------

SECRETS = [
    ("a Hugging Face token", f"x {TOKEN} y", TOKEN),
    ("a URL with credentials", "https://jane:s3cret@hub.example.com/m", "s3cret"),
    ("a URL with credentials", f"https://{'t' * 24}@hub.example.com/m", "t" * 24),
    (
        "a variable with its secret",
        "export WANDB_API_KEY=0123456789abcdef",
        "0123456789abcdef",
    ),
    (
        "a variable with its secret",
        "export MLFLOW_TRACKING_PASSWORD='correct-horse'",
        "correct",
    ),
]


@pytest.mark.parametrize(("kind", "text", "secret"), SECRETS)
def test_credentials_are_found_and_hidden(kind: str, text: str, secret: str) -> None:
    assert credentials.kind_in(text) == kind
    assert secret not in credentials.redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://hub.example.com/a@b", "git@github.com:a/b", "ssh://git@github.com/a",
        "export HF_TOKEN=$(cat ~/.token)", 'export HF_TOKEN="$MY"', "export HF_TOKEN=~/hf",
        "mail-user=jane@example.com", "hf_models/bert", "task-classification-of-long-texts",
        "TOKENIZERS_PARALLELISM=false", "0123456789abcdef0123456789abcdef01234567",
    ],
)  # fmt: skip
def test_what_is_no_credential(text: str) -> None:
    assert credentials.kind_in(text) is None
    assert credentials.redact(text) == text


def test_values_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "9f8e7d6c5b4a")
    assert credentials.redact("key 9f8e7d6c5b4a!") == "key [hidden]!"
    assert (
        credentials.kind_in("a9f8e7d6c5b4a") == "the value of a variable of this shell"
    )


@pytest.mark.parametrize(
    "values",
    [
        {"setup": (f"export HF_TOKEN={TOKEN}",)}, {"comment": TOKEN}, {"model": TOKEN},
        {"sbatch": (f"export=ALL,HF_TOKEN={TOKEN}",)}, {"data": f"https://me:{TOKEN}@h/x"},
    ],
)  # fmt: skip
def test_flags_with_credentials_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(UsageError) as error:
        configure(values)
    assert TOKEN not in str(error.value)
    assert "[hidden]" in str(error.value)


def test_arguments_of_a_program_with_credentials_are_refused() -> None:
    """`config.json` has them, which a group may read, and all users of the machine see them."""
    words = ["true", "--hub_token", TOKEN]
    for submit in (
        lambda: submission.configure(words, {}, {}),
        lambda: submission.in_image(words, {}),
        lambda: submission.in_image(
            ["true"], {"resume_args": f"--token {TOKEN}", "checkpoint_dir": "out"}
        ),
    ):
        with pytest.raises(UsageError, match=r"'.*\[hidden\]' holds a Hugging Face"):
            submit()


@pytest.mark.processes
def test_command_line_says_no_token() -> None:
    done = slurmft("submit", "--dry-run", "--comment", TOKEN)
    assert_two_lines(done, "--comment '[hidden]' holds a Hugging Face token")
    done = slurmft("submit", "--dry-run", TOKEN)
    assert "unexpected argument '[hidden]'" in done.err


@pytest.mark.processes
def test_records_hide_tokens(tmp_path: Path) -> None:
    config = RunConfig(
        program=TrainConfig.resolve().program(), job=JobConfig(runs_dir=str(tmp_path))
    )
    run = RunDir.create(config)
    error = SlurmftError(f"401 of https://a:{TOKEN}@hub/x", f"not {TOKEN}")
    run.add(Failure.of("rank 0", error, traceback=f"Traceback {TOKEN}"))
    run.set_state("failed", error.message)
    assert "401" in run.get_state().reason
    assert TOKEN not in provenance("submit", ["--comment", TOKEN]).command
    assert all(TOKEN not in p.read_text() for p in tmp_path.rglob("*.json"))


# --- where a job listens --------------------------------------------------------------------------


def point(*hosts: str, rank: int = 0, elastic: bool = False) -> Rendezvous:
    return Rendezvous(
        hosts=hosts, node_rank=rank, port=1, check_port=2, id="1.0", elastic=elastic
    )


def test_addresses_to_listen_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert point("n1").listen_address() == "127.0.0.1"
    assert point("n1").socket_interface() == "lo"
    assert point("pod-0", elastic=True).listen_address() is None
    assert point("127.0.0.1", "127.0.0.2", rank=1).listen_address() == "127.0.0.2"
    own = {"n1": ["127.0.1.1"], "n2": ["10.0.0.2"], "n3": ["10.0.0.2", "10.1.0.2"]}
    monkeypatch.setattr(rendezvous, "own_addresses", lambda host, family: own[host])
    monkeypatch.setattr(rendezvous, "address_towards", lambda peer: f"towards {peer}")
    assert point("n1", "n2").listen_address() == "towards n2"
    assert point("n1", "n2", rank=1).listen_address() == "10.0.0.2"
    assert point("n3", "n2").listen_address() is None
    assert point("n1", "n2").addresses() == ["towards n2", "127.0.1.1"]
    assert point("n3", "n2").addresses() == [""]


STORES = """
import psutil
from slurmft.node import torchrun
torchrun.bind_stores()
import importlib
from datetime import timedelta
from torch.distributed.rendezvous import _create_c10d_store
from torch.distributed.elastic.rendezvous import RendezvousParameters
module = importlib.import_module("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend")
first, second = {ports}
a = _create_c10d_store("n1", first, 0, 1, timedelta(seconds=20))
params = RendezvousParameters("c10d", f"n1:{{second}}", "1", 1, 1, is_host="true")
b = module._create_tcp_store(params)
a.set("a", "b"), b.set("a", "b")
sockets = [each for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"]
ours = [each.laddr for each in sockets if each.laddr.port in (first, second)]
print(sorted(f"{{address.ip}}:{{address.port}}" for address in ours))
"""


@pytest.mark.processes
@pytest.mark.parametrize("listen", ["n1=127.0.0.7", ""])
def test_stores_listen_on_one_address(listen: str) -> None:
    """torchrun's and the ranks'; also where the name of the host stands for nothing here."""
    ports = tuple(rendezvous.free_ports())
    code = STORES.format(ports=ports)
    if not listen:
        code = code.replace('"n1"', '"localhost"').replace("n1:", "localhost:")
    env = os.environ | {"SLURMFT_LISTEN": listen}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    address = "127.0.0.7" if listen else "::"
    assert json.loads(done.stdout.replace("'", '"')) == sorted(
        f"{address}:{p}" for p in ports
    )


# --- weights --------------------------------------------------------------------------------------


def test_pickled_weights_are_refused(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    folder = tmp_path / "pickled"
    shutil.copytree(tiny_model, folder)
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    flags = {"task": "emotion", "model": str(folder), "data": str(tiny_data)}
    with pytest.raises(UsageError, match="no weights in safetensors"):
        configure(flags)
    from transformers import AutoModelForSequenceClassification

    task = Task(
        TrainConfig.resolve(task="emotion", model=str(folder), data=str(tiny_data))
    )
    with pytest.raises(UsageError, match=r"use_safetensors=False\).save_pretrained"):
        task.pretrained(AutoModelForSequenceClassification)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(UsageError, match="holds no weights"):
        configure(flags)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_model_that_names_code_of_the_hub_is_refused(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, key: str
) -> None:
    """transformers would fetch and execute it as soon as the package `kernels` is installed."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    values = json.loads((folder / "config.json").read_text())
    values[key] = "somebody/kernel"
    (folder / "config.json").write_text(json.dumps(values))
    from transformers import AutoModelForSequenceClassification

    config = TrainConfig.resolve(task="emotion", model=str(folder), data=str(tiny_data))
    with pytest.raises(UsageError, match="names code of the hub") as error:
        Task(config).pretrained(AutoModelForSequenceClassification)
    assert "attn_implementation 'somebody/kernel'" in error.value.message


@pytest.mark.processes
@pytest.mark.parametrize(
    "start",
    [
        "from slurmft.train import rank; rank.prepare()",
        "from slurmft.train import prefetch; prefetch.main(['{}'])",
    ],
)
def test_no_kind_of_model_brings_code_of_the_hub(tmp_path: Path, start: str) -> None:
    """transformers would execute it for some, as soon as the package `kernels` is installed."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("__version__ = '0.18.2'\n")
    facts = tmp_path / "kernels-0.18.2.dist-info" / "METADATA"
    facts.parent.mkdir()
    facts.write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    code = (
        f"{start}\n"
        "from transformers.utils import is_kernels_available\n"
        "print(is_kernels_available())\n"
        "try:\n"
        "    from transformers.integrations.hub_kernels import get_kernel\n"
        "    get_kernel('kernels-community/yoso', version=1)\n"
        "except ImportError: print('no code')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout.splitlines()[-2:] == ["False", "no code"], done.stderr


def test_a_run_that_is_held_is_told_of_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes, as that of a notification, do not have its descriptor."""
    run = write_run(tmp_path / "runs" / "emotion-1", state="running")
    heard: list[Path] = []

    def hear(run: RunDir) -> Callable[[], None]:
        heard.append(run.path)
        return lambda: None

    monkeypatch.setattr(hooks, "state_changed", hear)
    with run.held():
        run.path.rename(tmp_path / "elsewhere")
        run.set_state("cancelled")
        with pytest.raises(
            SlurmftError, match=f"{str(run.path)!r} was never submitted"
        ):
            launcher.job_of(run)
    assert heard == [run.path]
    assert RunDir(tmp_path / "elsewhere").get_state().state == "cancelled"
