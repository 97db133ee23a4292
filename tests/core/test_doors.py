"""Each dangerous act has its place: what could execute, follow or delete something that another
user has made occurs in the modules that guard it, and nowhere else.

`python -m tests.core.test_doors` prints the part of docs/security.md that is made from the code.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurmft
from slurmft.core.site import all_options
from slurmft.core.trusted import Door
from slurmft.runs.rundir import RunDir, _Below
from tests.support.uses import uses

_ROOT = Path(slurmft.__file__).parent

# Act -> what carries it out, as `tests.support.uses` calls it, and the modules that may. A module
# that is missing here has to ask one of these.
DOORS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "open what is to be trusted": (
        ("os.O_NOFOLLOW", "os.O_PATH", "os.fwalk"),
        (
            "core/below.py",
            "core/descent.py",
            "core/files.py",
            "core/ownership.py",
            "core/removal.py",
            "core/trusted.py",
        ),
    ),
    "write by a path, through links": (
        (
            *("open to write", ".write_text", ".write_bytes", ".touch"),
            *("os.O_WRONLY", "os.O_RDWR", "os.O_CREAT", "os.O_TRUNC", "os.truncate"),
            *("shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree"),
        ),
        (
            # The doors: they write through a descriptor, which they or their callers have opened.
            "core/below.py",
            "core/files.py",
            "core/trusted.py",
            "locks/__init__.py",
            "node/supervisor.py",
            "plugins/mpirun/launcher.py",
            "plugins/mpirun/rank.py",
            "plugins/notify/notification.py",
            "runs/attempts.py",
            "runs/request.py",
            # Into a folder that nobody else can write, which they or their callers have just made.
            "core/git.py",
            "job/checkpoints.py",
            "job/process.py",
            "locks/shim/sitecustomize.py",
            "node/agents.py",
            "node/flight_recorder.py",
            "node/heartbeat.py",
            "node/task.py",
            "plugins/examine/agent.py",
            "plugins/stage_env/unpack.py",
            "train/data/token_data.py",
            "train/loop/checkpoint.py",
            "train/loop/saving.py",
            "train/parallel/sharding.py",
            "train/token_cache.py",
            # A pipe, memory, a file that was absent (mode "x"), and those of /proc and /dev.
            "__main__.py",
            "core/process.py",
            "core/terminal.py",
            "node/prefork.py",
            "plugins/examine/lock_operations.py",  # a random name
            "train/login/rows.py",
            "train/loop/batch_size_search.py",
        ),
    ),
    "rename by a path": (
        (
            *("os.rename", "os.renames", "os.replace", ".rename", "Path.replace"),
            *("shutil.move",),
        ),
        (
            # In folders that they have opened.
            "core/files.py",
            "core/removal.py",
            "job/checkpoints.py",
            "programs/snapshot.py",
            # Where nobody else can rename, or what nobody else can replace: a folder that holds
            # something, or another name that nobody knew.
            "core/trusted.py",
            "node/flight_recorder.py",
            "plugins/stage_env/pack.py",
            "plugins/stage_env/unpack.py",
            "train/login/rows.py",
            "train/token_cache.py",
        ),
    ),
    "change who may do what": (
        ("os.chmod", "os.fchmod", ".chmod", "os.chown", "os.fchown", "shutil.chown"),
        (
            "core/writers.py",
            # What they have just made.
            "core/files.py",
            "node/compile_cache.py",
            "programs/snapshot.py",
        ),
    ),
    "ask whose a file is": (
        (".st_uid", "stat.ST_UID"),
        (
            "core/descent.py",
            "core/ownership.py",
            "core/removal.py",
            "core/trusted.py",
            "core/writers.py",
            # They show it, or leave out what is another user's.
            "cluster/cleanup.py",
            "cluster/facts.py",
            "cluster/wait.py",
            "core/filesystem.py",
            "node/watchdog.py",
            "plugins/stage_env/unpack.py",
            "programs/checkpoints.py",
            "runs/disk_space.py",
            "runs/resolve.py",
        ),
    ),
    "unpickle": (
        (
            *(
                "pickle",
                "_pickle",
                "marshal",
                "shelve",
                "dill",
                "cloudpickle",
                "joblib",
            ),
            *("torch.load", "torch.save", "torch.jit.load", "torch.package"),
            *(
                "allow_pickle=",
                ".read_pickle",
                ".to_pickle",
                "multiprocessing.connection",
            ),
            *("multiprocessing.Pipe", "multiprocessing.Queue", "multiprocessing.Pool"),
            *("multiprocessing.Manager", "concurrent.futures.ProcessPoolExecutor"),
            *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.full_load_all"),
            *("yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.Loader"),
        ),
        (),
    ),
    "send pickles to other ranks": (
        (
            *(".gather_object", ".all_gather_object", ".broadcast_object_list"),
            *(".scatter_object_list", ".send_object_list", ".recv_object_list"),
        ),
        (),
    ),
    "unpack": (
        (
            *("tarfile", "zipfile", "shutil.unpack_archive"),
            *("command tar", "command unzip", "command cpio", "command bsdtar"),
        ),
        (
            "programs/file_ends.py",  # looks whether a file is whole
            "plugins/stage_env/pack.py",  # packs
            "plugins/stage_env/unpack.py",  # what the door has opened
        ),
    ),
    "execute": (
        (
            *("exec", "eval", "compile", "runpy", "code", "torch.hub"),
            *(".spec_from_file_location", ".SourceFileLoader", ".SourcelessFileLoader"),
            *(".ExtensionFileLoader", ".exec_module", ".load_module"),
            "trust_remote_code=",
        ),
        (
            "core/after_import.py",  # what Python has found, as Python would
            "locks/shim/sitecustomize.py",  # the user's own one
            "plugins/integrations/__main__.py",  # the script that the user names
        ),
    ),
    "load a library": (
        ("ctypes.CDLL", "ctypes.cdll", "ctypes.PyDLL", "cffi", ".load_library"),
        (
            # What is loaded already: Python's C library, and that of MPI.
            "core/ownership.py",
            "core/process.py",
            "job/process.py",
            "train/engine/cpu.py",
        ),
    ),
    "import what is computed": (
        ("import what is computed",),
        (
            # Names that are written in slurmft's code.
            "__init__.py",
            "job/backend.py",
            "node/backend_probe.py",
            "node/prefork.py",
            "node/torchrun.py",
            "plugins/integrations/__main__.py",
            "train/ipex.py",
            "train/loop/evaluator.py",
            "train/rank.py",
            "train/tasks/metrics.py",
            # Of installed packages, and of the task that the user names.
            "core/plugins.py",
            "train/own_task.py",
        ),
    ),
    "take what is computed from a module": (
        ("take what is computed",),
        (
            # Streams of sys, types of torch, and what its version says.
            "__main__.py",
            "core/terminal.py",
            "job/devices.py",
            "job/process_group.py",
            "locks/__init__.py",
            "node/backend_probe.py",
            "runs/log_times.py",
            "train/engine/sentence_head.py",
            "train/tasks/pretrained.py",
        ),
    ),
    "give a line to a shell": (
        (
            *("os.system", "os.popen", "subprocess.getoutput", "shell="),
            *("subprocess.getstatusoutput", "command sh", "command bash"),
        ),
        (
            "cli/completion.py",  # for which shells there is completion
            # `setup` lines, --notify-command and oneCCL's own script.
            "cluster/local.py",
            "node/ccl.py",
            "plugins/kubernetes/manifests.py",
            "plugins/notify/notification.py",
        ),
    ),
    "become another program": (
        (
            *("os.execl", "os.execle", "os.execlp", "os.execlpe", "os.execv"),
            *("os.execve", "os.execvp", "os.execvpe"),
        ),
        (
            "locks/__main__.py",  # Python, as the user has typed
            "node/container.py",
        ),
    ),
    "start git": (
        ("command git", "git", "pygit2", "dulwich"),
        (
            "core/git.py",
            "programs/snapshot.py",  # looks whether it is installed
        ),
    ),
    "delete": (
        (
            *("shutil.rmtree", ".rmtree", "os.unlink", ".unlink", "os.rmdir", ".rmdir"),
            *("os.remove", "os.removedirs", "command rm", "command rmdir"),
        ),
        ("core/removal.py",),
    ),
    "make a temporary folder or file of a name": (
        (
            *("tempfile.TemporaryDirectory", "tempfile.mkdtemp", "tempfile.gettempdir"),
            *("tempfile.NamedTemporaryFile", "tempfile.mkstemp", "tempfile.mktemp"),
            *("tempfile.SpooledTemporaryFile", "tempfile.tempdir"),
        ),
        (
            "core/trusted.py",
            # By `temporary_place`.
            "core/git.py",
            "locks/__init__.py",
            "node/container.py",
            "node/watchdog.py",
            "plugins/examine/agent.py",
            "plugins/remote/forward.py",
            "train/engine/saved_weights.py",
            "train/tasks/pretrained.py",
            # They look at it; or ask for a folder by a door.
            "node/compile_cache.py",
            "plugins/examine/inspection.py",
            "plugins/examine/login.py",
        ),
    ),
    "use the path of imports": (
        ("sys.path", "sys.meta_path", "sys.path_hooks", "site.addsitedir"),
        (
            "core/after_import.py",
            "core/interpreter.py",  # of a program that an integration runs as Python would
            "core/plugins.py",  # reads it
            "locks/shim/sitecustomize.py",  # its own package
            "node/backend_probe.py",  # its own package
            "plugins/examine/login.py",  # reads it
            "programs/accelerate_variables.py",  # takes its folder off
            "programs/submission.py",  # reads it
            "train/own_task.py",  # of tasks that the user names, or of the frozen code
        ),
    ),
    "start Python": (
        (
            *("sys.executable", "sys._base_executable"),
            *("command python", "command python3"),
        ),
        (
            "core/interpreter.py",
            # The words of a program, which `interpreter` makes a command; and of a command of uv.
            "programs/environment.py",
            "programs/submission.py",
            "plugins/studies/report/provenance.py",  # the name of a column
        ),
    ),
    "link": (
        (
            *("os.link", ".hardlink_to", ".link_to", "os.symlink", ".symlink_to"),
            "command ln",
        ),
        (
            "core/below.py",  # a link as a link, in an open folder
            "plugins/stage_env/unpack.py",  # of a new name, where nobody else can rename
            "runs/attempts.py",  # the claim of a submission, which leads nowhere
            "train/token_cache.py",  # what lies in a private folder
        ),
    ),
    "act on the configuration of a run, whoever wrote it": (
        (".load_config",),
        (
            # They show, or ask what does not decide what runs.
            "api.py",
            "cli/foreign.py",  # shows what a run from elsewhere would execute
            "cli/submission.py",
            "cluster/facts.py",
            "cluster/follow.py",
            "runs/rundir.py",
            "train/login/model_card.py",
            "train/login/predict.py",  # the model; for the code of a task it asks the door
            # They have just written it, or are called by what the door has let in.
            "cluster/launcher.py",
            "cluster/local.py",
            "cluster/slurm/first_node.py",
            "cluster/wait.py",
            "plugins/kubernetes/pod.py",
            "plugins/notify/notification.py",
            "plugins/stage_env/hooks.py",
            "plugins/trackers/hooks.py",
            "plugins/trackers/trackers.py",
            "runs/attempts.py",
        ),
    ),
}


# Act -> sources that carry it out in ways that are not the usual one.
OTHER_WAYS: dict[str, tuple[str, ...]] = {
    "open what is to be trusted": (
        "import os as o; o.O_PATH",
        "from os import fwalk as f; f(x)",
    ),
    "write by a path, through links": (
        "open(x, mode='w')",
        "open(x, mode)",
        "path.open('wb')",
        "path.open(mode='a')",
        "import io; io.open(x, 'w')",
        "from os import fdopen as f; f(3, 'w')",
        "from os import O_WRONLY, open as o; o(x, O_WRONLY)",
        "path.touch()",
        "from shutil import copytree as c",
        "import shutil as s; s.copy2(x, y)",
        "write = Path.write_text",
    ),
    "rename by a path": (
        "from shutil import move",
        "from os import rename as r",
        "import os as o; o.replace(x, y)",
        "path.replace(other)",
        "path.rename(other)",
    ),
    "change who may do what": ("path.chmod(0o777)", "from os import chown as c"),
    "ask whose a file is": ("import stat as s; status[s.ST_UID]",),
    "unpickle": (
        "import pickle as p",
        "from pickle import loads",
        "import _pickle",
        "__import__('pickle')",
        "from importlib import import_module as i; i('dill')",
        "import torch as t; t.load(x)",
        "from torch import load as l",
        "import torch; getattr(torch, 'load')(x)",
        "import numpy as np; np.load(x, allow_pickle=True)",
        "numpy.load(x, allow_pickle=is_own)",
        "import yaml as y; y.load(x)",
        "from yaml import unsafe_load",
        "import shelve",
        "import pandas as pd; pd.read_pickle(x)",
        "from joblib import load",
        "from multiprocessing.connection import Client",
        "from concurrent.futures import ProcessPoolExecutor as P",
    ),
    "send pickles to other ranks": (
        "from torch.distributed import gather_object as g",
        "dist.broadcast_object_list(x)",
    ),
    "unpack": (
        "import tarfile as t",
        "from tarfile import open as o",
        "from zipfile import ZipFile",
        "__import__('tarfile')",
        "from shutil import unpack_archive as u",
        "run(['/bin/tar', 'x'])",
        "run(('unzip', x))",
    ),
    "execute": (
        "run = exec; run(x)",
        "import builtins as b; b.exec(x)",
        "import builtins; getattr(builtins, 'eval')(x)",
        "compile(x, y, 'exec')",
        "import runpy as r; r.run_path(x)",
        "from importlib.util import spec_from_file_location as s",
        "from importlib.machinery import SourceFileLoader as S",
        "load(x, trust_remote_code=True)",
        "from torch import hub",
    ),
    "load a library": ("from ctypes import CDLL as C", "torch.ops.load_library(x)"),
    "import what is computed": (
        "__import__(x)",
        "import importlib as i; i.import_module(x)",
    ),
    "take what is computed from a module": ("import os; getattr(os, x)(y)",),
    "give a line to a shell": (
        "run(x, shell=True)",
        "from os import system as s",
        "run(['/bin/sh', '-c', x])",
    ),
    "become another program": (
        "from os import execv as e",
        "import os as o; o.execvp(x, y)",
    ),
    "start git": (
        "run(['git', 'status'])",
        "run(('/usr/bin/git', 'status'))",
        "from shutil import which as w; w('git')",
        "import git",
    ),
    "delete": (
        "from shutil import rmtree",
        "import shutil as s; s.rmtree(x)",
        "from os import unlink as u; u(x)",
        "from os import remove as r",
        "import os as o; o.rmdir(x)",
        "import os; getattr(os, 'unlink')(x)",
        "from pathlib import Path; Path.unlink(x)",
        "list(map(Path.unlink, folder.glob('*')))",
        "run(['/bin/rm', x])",
    ),
    "make a temporary folder or file of a name": (
        "from tempfile import mkdtemp as m",
        "import tempfile as t; t.NamedTemporaryFile()",
    ),
    "use the path of imports": (
        "import sys as s; s.path += [x]",
        "from sys import path as p",
        "import sys; sys.path[0] = x",
        "import sys; sys.meta_path.insert(0, x)",
    ),
    "start Python": (
        "from sys import executable as e",
        "import sys as s; s.executable",
        "run(['/usr/bin/python3', x])",
    ),
    "link": (
        "from os import link as l",
        "import os as o; o.symlink(x, y)",
        "path.hardlink_to(x)",
        "run(['ln', x, y])",
    ),
    "act on the configuration of a run, whoever wrote it": (
        "getattr(run, 'load_config')()",
    ),
}


@pytest.mark.parametrize("act", DOORS)
def test_act_is_seen_however_it_is_written(act: str) -> None:
    names, _ = DOORS[act]
    unseen = []
    for source in OTHER_WAYS[act]:
        if not {name for name, _ in uses(ast.parse(source))} & set(names):
            unseen.append(source)
    assert not unseen


@pytest.mark.parametrize(
    "source",
    [
        "open(x); open(x, 'rb'); path.open(); door.open(path, folder)",
        "names.remove(x); text.replace('a', 'b'); time.replace(tzinfo=None); model.eval()",
        "run(['bash-completion', x], shell=False); array.load(allow_pickle=False)",
        "import re; re.compile(x); from slurmft.core import files, git; files.write_text(x, y)",
        "import importlib; importlib.import_module('json'); getattr(run, name)",
    ],
)
def test_other_uses_are_no_act(source: str) -> None:
    names = {name for name, _ in uses(ast.parse(source))}
    for act, (guarded, _) in DOORS.items():
        assert not names & set(guarded), act


@functools.cache
def _modules() -> list[tuple[str, ast.AST]]:
    modules: list[tuple[str, ast.AST]] = []
    for path in sorted(_ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules.append((str(path.relative_to(_ROOT)), tree))
    return modules


@functools.cache
def _all_uses() -> dict[str, list[tuple[str, int]]]:
    """Returns what each module uses: every act asks for it, and to find it takes seconds."""
    return {module: list(uses(tree)) for module, tree in _modules()}


@pytest.mark.parametrize("act", DOORS)
def test_act_occurs_in_the_modules_that_guard_it_alone(act: str) -> None:
    names, modules = DOORS[act]
    elsewhere = []
    used = set()
    for module, found in _all_uses().items():
        for name, line in found:
            if name in names:
                used.add(module)
                if module not in modules:
                    elsewhere.append(f"{module}:{line}: {name}")
    assert not elsewhere
    # A module that does it no more has no place here.
    assert used == set(modules)


def test_an_owner_that_is_believed_is_asked_of_one_module() -> None:
    """A file system that another user serves shows whichever owners they like."""
    elsewhere = []
    _, modules = DOORS["ask whose a file is"]
    for module in modules:
        for function in ast.walk(ast.parse((_ROOT / module).read_text())):
            if isinstance(function, ast.FunctionDef):
                elsewhere += [f"{module}:{line}" for line in _owners_as_shown(function)]
    assert not elsewhere


def test_names_that_other_users_give_are_read_by_two_functions() -> None:
    """Those of processes and of mounted folders are of any bytes."""
    readers = set()
    for path in _ROOT.rglob("*.py"):
        if re.search(r"/proc/(\{pid|self/mount)", path.read_text(encoding="utf-8")):
            readers.add(str(path.relative_to(_ROOT)))
    # core/ownership.bash reads mounts, too: it passes over lines that are none.
    assert readers == {"core/mounts.py", "core/process.py"}


def _owners_as_shown(function: ast.FunctionDef) -> Iterator[int]:
    """The lines of a function that take an owner out of what Python's own calls return."""
    names = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            names[ast.unparse(node.targets[0])] = ast.unparse(node.value.func)
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and node.attr == "st_uid":
            source = names.get(ast.unparse(node.value), ast.unparse(node.value))
            if re.search(r"\b(l?stat|fstat)\b", source.replace("ownership.status", "")):
                yield node.lineno


# --- what docs/security.md lists ------------------------------------------------------------------


def doors() -> list[Door]:
    """Returns all doors that the code declares, without importing it: much of it needs torch."""
    declared = []
    for module, tree in _modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            if ast.unparse(node.func).rpartition(".")[2] != "Door":
                continue
            values = [ast.literal_eval(value) for value in node.args]
            assert len(values) == 3, f"{module}:{node.lineno}"
            declared.append(Door(*values))
    return sorted(declared, key=lambda door: door.what)


def trusted_table() -> str:
    rows = ["| what | where | what it decides |", "|---|---|---|"]
    rows += [f"| {door.what} | {door.where} | {door.becomes} |" for door in doors()]
    return "\n".join(rows)


def named_by_the_user() -> str:
    """The options whose values are files or folders that a run reads, or executes."""
    flags = []
    for option in all_options().values():
        if option.path in ("input", "there"):
            flags.append(f"`{option.flag}`")
    return ", ".join(sorted(flags))


def only_shown() -> str:
    """The files of a run that decide nothing that is executed."""
    guarded = " ".join(door.where for door in doors())
    run = RunDir(Path("RUN"))
    names = []
    for attribute, value in vars(RunDir).items():
        if isinstance(value, _Below):
            path = str(getattr(run, attribute))
            # Slurm keeps a copy of the script; tasks of arrays ask the door in bash.
            if path not in guarded and path != "RUN/submitit/job.sh":
                names.append(f"`{path.removeprefix('RUN/')}`")
    return ", ".join(sorted(names))


def test_page_lists_all_that_is_read_from_where_others_may_write() -> None:
    page = (_ROOT.parent / "docs" / "security.md").read_text(encoding="utf-8")
    flowing = " ".join(page.split())
    assert trusted_table() in page
    assert named_by_the_user() in flowing
    assert only_shown() in flowing


if __name__ == "__main__":
    print(trusted_table(), named_by_the_user(), only_shown(), sep="\n\n")
