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

_ROOT = Path(slurmft.__file__).parent

# Act -> the calls and names that carry it out, and the modules that may. A module that is missing
# here has to ask one of these.
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
            *("open() to write", "write_text", "write_bytes"),
            *("shutil.copy", "shutil.copyfile", "shutil.copytree"),
        ),
        (
            # The doors: they write through a descriptor, which they or their callers have opened.
            "core/below.py",
            "core/files.py",
            "core/trusted.py",
            "locks/__init__.py",
            "runs/request.py",
            # Into a folder that nobody else can write, which they or their callers have just made.
            "core/git.py",
            "job/checkpoints.py",
            "job/process.py",
            "locks/shim/sitecustomize.py",
            "node/flight_recorder.py",
            "node/heartbeat.py",
            "plugins/examine/agent.py",
            "plugins/stage_env/unpack.py",
            "train/data/token_data.py",
            "train/loop/checkpoint.py",
            "train/loop/saving.py",
            "train/parallel/sharding.py",
            "train/token_cache.py",
            # A pipe, a file that was absent (mode "x"), and one of /proc.
            "node/prefork.py",
            "train/login/rows.py",
            "train/loop/batch_size_search.py",
        ),
    ),
    "ask whose a file is": (
        ("st_uid",),
        (
            "core/descent.py",
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
            "pickle",
            "torch.load",
            "dill",
            "cloudpickle",
            "marshal",
            "shelve",
            "joblib.load",
        ),
        (),
    ),
    "send pickles to other ranks": (
        (
            *("gather_object", "all_gather_object", "broadcast_object_list"),
            *("scatter_object_list", "send_object_list", "recv_object_list"),
        ),
        (),
    ),
    "unpack": (
        ("tarfile", "zipfile", "shutil.unpack_archive", "'tar'"),
        (
            "programs/file_ends.py",  # looks whether a file is whole
            "plugins/stage_env/pack.py",  # packs
            "plugins/stage_env/unpack.py",  # what the door has opened
        ),
    ),
    "execute": (
        (
            "exec()",
            "eval()",
            "runpy.run_path",
            "runpy.run_module",
            "spec_from_file_location",
        ),
        ("plugins/integrations/__main__.py",),  # the script that the user names
    ),
    "delete": (
        (
            *("rmtree", "unlink", "rmdir", "os.remove", "os.removedirs", "os.unlink"),
            "'rm'",
        ),
        ("core/removal.py",),
    ),
    "make a temporary folder": (
        ("TemporaryDirectory", "mkdtemp", "gettempdir"),
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
    "change the path of imports": (
        ("sys.path.insert", "sys.path.append", "sys.path[:0]", "site.addsitedir"),
        (
            "core/interpreter.py",  # of a program that an integration runs as Python would
            "locks/shim/sitecustomize.py",  # its own package
            "node/backend_probe.py",  # its own package
            "train/own_task.py",  # of tasks that the user names, or of the frozen code
        ),
    ),
    "start Python": (
        ("sys.executable",),
        ("core/interpreter.py",),
    ),
    "link": (
        ("os.link", "hardlink_to"),
        ("train/token_cache.py",),  # what lies in a private folder
    ),
    "act on the configuration of a run, whoever wrote it": (
        ("load_config",),
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


def _uses(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields the dotted names that a module uses or imports, the plain names that it calls as
    "name()", its texts in quotes and what it assigns to, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        if isinstance(node, ast.ImportFrom):
            yield str(node.module), node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node), node.lineno
            yield node.attr, node.lineno
        if isinstance(node, ast.Subscript | ast.Constant):
            yield ast.unparse(node), node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield f"{node.func.id}()", node.lineno
            # The mode of open(): "r" and "rb" read.
            modes = [ast.unparse(mode) for mode in node.args[1:2]]
            if node.func.id == "open" and set("wax+") & set("".join(modes)):
                yield "open() to write", node.lineno


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
    return {module: list(_uses(tree)) for module, tree in _modules()}


@pytest.mark.parametrize("act", DOORS)
def test_act_occurs_in_the_modules_that_guard_it_alone(act: str) -> None:
    names, modules = DOORS[act]
    elsewhere = []
    used = set()
    for module, uses in _all_uses().items():
        for name, line in uses:
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
