"""Entry points: slurmft's own, and those of other packages."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.cli import list as listing
from slurmft.cli import status
from slurmft.cli.commands import load_command, usage
from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser
from slurmft.cluster import launcher
from slurmft.cluster.slurm import sbatch_options
from slurmft.core import hooks, plugins
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import UsageError
from slurmft.core.options import build, options
from slurmft.core.plugins import COMMANDS, PluginError
from slurmft.core.program import Program
from slurmft.core.site import OPTIONS_OF_ON, site_defaults
from slurmft.plugins.studies.commands import report
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from slurmft.train.task_facts import TASKS
from tests.support import CHECKOUT
from tests.support.made_runs import write_run

HELLO = '''"""Says hello. It does nothing else."""


def main(argv):
    print("hello", *argv)
    return 3
'''


def package(folder: Path, name: str, entries: str, **modules: str) -> None:
    """Installs a package with these entry points, as pip does."""
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "entry_points.txt").write_text(entries)
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path, for packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    plugins._installed.cache_clear()
    monkeypatch.setattr(plugins, "_installed", plugins._installed.__wrapped__)
    monkeypatch.setattr(plugins, "load_all", plugins.load_all.__wrapped__)
    return folder


def test_every_command_of_ours_has_a_short_summary() -> None:
    entries = plugins.entries(COMMANDS)
    assert {"submit", "run", "study", "doctor", "pull", "render"} <= entries.keys()
    for name, entry in entries.items():
        assert entry.package == "slurmft"
        assert 10 < len(entry.summary()) <= 66, name
        assert entry.load().main, name


def test_every_command_of_ours_says_how_it_runs_elsewhere() -> None:
    """What --on does with it: see `slurmft.cli.elsewhere`."""
    modules = {name: entry.load() for name, entry in plugins.entries(COMMANDS).items()}
    silent = [
        name
        for name, each in modules.items()
        if not isinstance(each.ELSEWHERE, Elsewhere)
    ]
    assert silent == []
    # What does its work here is not run there.
    alone = [name for name, each in modules.items() if Elsewhere.HERE in each.ELSEWHERE]
    assert all(modules[name].ELSEWHERE is Elsewhere.HERE for name in alone)


def test_ours_are_what_is_installed() -> None:
    """Other tools see the entry points of slurmft as it sees them itself."""
    installed = importlib.metadata.distribution("slurmft").entry_points
    ours = {(entry.group, entry.name, entry.value) for entry in installed}
    ours -= {("console_scripts", "slurmft", "slurmft.__main__:console")}
    declared = plugins._ours()
    assert ours == {
        (g, name, target) for g in declared for name, target in declared[g].items()
    }


@pytest.mark.processes
def test_command_of_another_package(site: Path) -> None:
    package(site, "my-tools", "[slurmft.commands]\nhello = my_hello\n", my_hello=HELLO)
    entry = plugins.get(COMMANDS, "hello", "command")
    assert (entry.package, entry.summary()) == ("my-tools", "Says hello")
    assert "\nof other packages:\n  hello      Says hello (my-tools)\n" in usage()
    assert "my_hello" not in sys.modules
    assert entry.load().main([]) == 3
    command = [sys.executable, "-m", "slurmft", "hello", "you"]
    env = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{CHECKOUT}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "hello you\n")


@pytest.mark.parametrize("on_path", ["", ".", "absolute", "link"])
def test_working_directory_has_no_packages(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_path: str
) -> None:
    """`python -m` puts it on sys.path; other accounts may write there."""
    folder = tmp_path / "shared"
    package(folder, "planted", "[slurmft.commands]\nplanted = planted_hello\n")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    paths = {"absolute": str(folder), "link": str(tmp_path / "link")}
    monkeypatch.syspath_prepend(paths.get(on_path, on_path))
    package(site, "my-tools", "[slurmft.commands]\nhello = my_hello\n")
    assert plugins.find(COMMANDS, "planted") is None
    assert plugins.find(COMMANDS, "hello") is not None
    # "" and "." lead elsewhere now; a folder by name is like any other
    monkeypatch.chdir(tmp_path)
    is_named = on_path in paths
    assert (plugins.find(COMMANDS, "planted") is not None) == is_named


def test_removed_working_directory(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(site, "my-tools", "[slurmft.commands]\nhello = my_hello\n")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.syspath_prepend("")
    assert plugins.find(COMMANDS, "hello") is not None


def test_package_that_fails_at_import(site: Path) -> None:
    """Its command says why; the others work."""
    package(
        site,
        "bad",
        "[slurmft.commands]\nbroken = bad_one\n",
        bad_one="import nothing_there",
    )
    entry = plugins.get(COMMANDS, "broken", "command")
    with pytest.raises(
        PluginError, match=r"'broken' of the package bad .* 'nothing_there'"
    ) as e:
        entry.load()
    assert e.value.hint == "mend or remove it; --debug shows where it fails"
    assert "  broken     (bad)\n" in usage()


def test_nobody_replaces_a_command_of_ours(site: Path) -> None:
    package(site, "sly", "[slurmft.commands]\nsubmit = sly_submit\n", sly_submit=HELLO)
    assert plugins.get(COMMANDS, "submit", "command").package == "slurmft"
    assert plugins.entries(COMMANDS)["submit"].package == "slurmft"
    assert "ignored: submit of the package sly: slurmft has its own" in usage()


HOOKS = """
from slurmft.core.errors import UsageError
from slurmft.core.hooks import Hooks, ScriptLines


class NoNights(Hooks):
    def check(self, job, cluster):
        if job.job_name == "night":
            raise UsageError("no jobs at night", "sleep")

    def script_lines(self, config, run):
        return ScriptLines("echo in", "echo out")
"""


def test_hooks_of_another_package(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside slurmft's; those of a package that cannot be imported are left out."""
    package(site, "nights", "[slurmft.hooks]\nnights = nights:NoNights\n", nights=HOOKS)
    package(
        site, "bad-hooks", "[slurmft.hooks]\nbad = bad_hooks:Bad\n", bad_hooks="1 / 0"
    )
    monkeypatch.setattr(hooks, "_members", functools.cache(hooks._members.__wrapped__))
    config = RunConfig(program=Program(kind="x", name="x", module="m"), job=JobConfig())
    hooks.check(config.job, "local")
    with pytest.raises(UsageError, match="no jobs at night"):
        hooks.check(JobConfig(job_name="night"), "local")
    assert hooks.script_lines(config, RunDir(site)) == hooks.ScriptLines(
        "echo in", "echo out"
    )
    warning = (
        "warning: 'bad' of the package bad-hooks cannot be imported: ZeroDivisionError("
    )
    assert capsys.readouterr().err.startswith(warning)
    assert len(hooks._members()) == 7


OPTIONS = """
from dataclasses import dataclass

from slurmft.core.options import option


@dataclass(frozen=True)
class Night:
    \"\"\"Nights.

    They are dark.
    \"\"\"

    moon: str = option(
        "full", "shape", affects="nothing", at="job", choices=("full", "new"), sbatch="moon"
    )
    lamps: tuple[str, ...] = option((), "lamps", affects="nothing", at="job")
"""


def test_job_options_of_another_package(site: Path) -> None:
    """They are flags, keys of the site file and of config.json, and have their own section."""
    package(
        site, "nights", "[slurmft.job_options]\nnight = night:Night\n", night=OPTIONS
    )
    text = Parser("x", None).add_options(JobConfig, "j").format_help()
    assert "\nNights:\n  --moon full|new " in text
    job = build(JobConfig, {"moon": "new", "nodes": 2, "lamps": ("a", "b")})
    assert sbatch_options.of_fields(job, ["moon", "nodes"]) == {
        "moon": "new",
        "nodes": "2",
    }
    with pytest.raises(UsageError, match="unknown --moon 'half'"):
        build(JobConfig, {"moon": "half"})
    config = RunConfig(program=Program(kind="x", name="x", module="m"), job=job)
    assert (
        json.loads(config.to_json())["job"].items()
        >= {"moon": "new", "nodes": 2}.items()
    )
    assert RunConfig.from_json(config.to_json()) == config
    assert job.replaced({"moon": "full"}).values() == job.values() | {"moon": "full"}
    night = plugins.get(plugins.JOB_OPTIONS, "night", "plug-in").load()
    assert job.options_of(night) == night(moon="new", lamps=("a", "b"))


def test_run_with_options_of_a_plugin_that_is_gone(tmp_path: Path) -> None:
    """It is listed and shown, and keeps them where it is submitted again."""
    run = write_run(tmp_path / "runs" / "old")
    config = json.loads(run.config.read_text())
    config["job"] |= {"moon": "new", "lamps": ["a"]}
    run.config.write_text(json.dumps(config))
    job = run.load_config().job
    assert job.replaced({"nodes": 3}).values() == job.values() | {"nodes": 3}
    assert job.values()["lamps"] == ("a",)
    assert status.main([str(run.path), "--json"]) == 0
    assert listing.main(["--runs-dir", str(run.path.parent)]) == 0
    assert report.main([str(run.path.parent)]) == 0


def test_job_options_that_fail_at_import(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning names them; those of all others work, and so do the site file's."""
    package(
        site, "bad", "[slurmft.job_options]\nmoon = bad_moon:Moon\n", bad_moon="1 / 0"
    )
    (site / "site.toml").write_text('nodes = 7\nmoon = "new"\n')
    monkeypatch.setenv("SLURMFT_SITE", str(site / "site.toml"))
    known = options(JobConfig)
    assert {"nodes", "notify", "log_with"} <= known.keys()
    assert site_defaults(known) == {"nodes": 7}
    warning = (
        "warning: 'moon' of the package bad cannot be imported: ZeroDivisionError("
    )
    assert capsys.readouterr().err.startswith(warning)


UNSOUND = {
    "no dataclass": ("class Moon:\n    pass\n", "must be called with a dataclass type"),
    "a name of ours": (
        OPTIONS.replace("moon: str", "nodes: str").replace("Night", "Moon"),
        "slurmft has nodes already",
    ),
    "an end at import": ("import sys\nsys.exit(0)\n", "SystemExit"),
    "no answer": (
        OPTIONS.replace('affects="nothing", ', "", 1).replace("Night", "Moon"),
        "affects is None, none of result, speed, both, nothing",
    ),
}


@pytest.mark.parametrize("what", UNSOUND)
def test_job_options_that_cannot_be_used(
    site: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """A warning names them; those of all others are there."""
    code, words = UNSOUND[what]
    # A name of its own: a module is imported once.
    module = "bad_" + what.replace(" ", "_")
    package(
        site, "bad", f"[slurmft.job_options]\nmoon = {module}:Moon\n", **{module: code}
    )
    known = options(JobConfig)
    assert {"nodes", "notify", "log_with"} <= known.keys()
    assert "moon" not in known
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ")
    assert words in warning


def test_two_packages_with_one_option(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one's stands; the warning says whose it is."""
    for name in ("first", "second"):
        group = f"[slurmft.job_options]\n{name} = {name}_night:Night\n"
        package(site, name, group, **{f"{name}_night": OPTIONS})
    text = Parser("x", None).add_options(JobConfig, "j").format_help()
    assert text.count("--moon") == 1
    assert capsys.readouterr().err == (
        "warning: the options of second_night.Night cannot be used: "
        "first_night.Night has lamps, moon already; they are left out\n"
    )


def test_job_options_that_a_program_has(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own flag stays; a warning says what is left out."""
    code = OPTIONS.replace("moon: str", "epochs: str").replace("Night", "Moon")
    package(
        site, "bad", "[slurmft.job_options]\nmoon = bad_epochs:Moon\n", bad_epochs=code
    )
    parser = Parser("x", None).add_options(TrainConfig, "t").add_options(JobConfig, "j")
    assert "--epochs N" in parser.format_help()
    assert "--lamps" not in parser.format_help()
    assert capsys.readouterr().err == (
        "warning: options of bad_epochs.Moon: the program has epochs already; "
        "the flags are left out\n"
    )


BAD_HOOKS = """
from slurmft.core.hooks import Hooks

class Raises(Hooks):
    def check(self, job, cluster):
        raise ValueError("new moon")

    def shared_cache(self):
        raise KeyError("moon")

class Stranger:
    pass
"""


def test_hooks_that_raise(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job does not fail for them: a warning says what is left out."""
    entries = "[slurmft.hooks]\na = bad_hooks:Raises\nb = bad_hooks:Stranger\n"
    package(site, "bad", entries, bad_hooks=BAD_HOOKS)
    monkeypatch.setattr(hooks, "_members", functools.cache(hooks._members.__wrapped__))
    hooks.check(JobConfig(), "local")
    hooks.shared_caches()
    assert capsys.readouterr().err.splitlines() == [
        "warning: bad_hooks.Stranger: TypeError('it is no subclass of slurmft.core.hooks.Hooks'); "
        "it is left out",
        "warning: bad_hooks.Raises: ValueError('new moon'); it is left out",
        "warning: bad_hooks.Raises: KeyError('moon'); it is left out",
    ]


@pytest.mark.parametrize("text", ["[", "[1]", "null"])
def test_site_options_that_are_no_object(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(OPTIONS_OF_ON, text)
    with pytest.raises(UsageError, match="is no JSON object") as error:
        site_defaults(options(JobConfig))
    assert error.value.hint == "unset it"


LAUNCHER = "plan = submit = job_state = cancel = location = 1\n"
LAUNCHER += "DESTINATION = LOCATION_KIND = ''\nSTARTS_RANKS = False\n"


def test_modules_that_lack_what_is_called(site: Path) -> None:
    """Two lines say what, as where a package cannot be imported."""
    entries = "[slurmft.launchers]\nhalf = half\n[slurmft.commands]\nhalf = half\n"
    package(site, "half", entries, half=LAUNCHER.replace("location = ", ""))
    with pytest.raises(PluginError, match="no launcher: half has no location") as error:
        launcher.get("half")
    assert error.value.hint == "mend or remove it"
    with pytest.raises(PluginError, match="no command: half has no main"):
        load_command("half")


def test_launcher_of_another_package(site: Path) -> None:
    package(
        site,
        "flux",
        "[slurmft.launchers]\nflux = flux_launcher\n",
        flux_launcher=LAUNCHER,
    )
    assert launcher.choose("flux") == "flux"
    assert launcher.get("flux").plan == 1  # type: ignore[comparison-overlap]
    with pytest.raises(UsageError, match="unknown --cluster 'slrm'") as error:
        launcher.choose("slrm")
    assert error.value.hint == "did you mean slurm?"


def test_every_task_of_ours_has_facts_and_a_class() -> None:
    assert plugins.entries(plugins.TASKS).keys() == TASKS.keys()


def test_name_of_two_packages(site: Path) -> None:
    for name in ("a", "b"):
        package(site, name, f"[slurmft.commands]\nhello = {name}_hello\n")
    with pytest.raises(UsageError, match="'hello' is of two packages: a and b"):
        plugins.find(COMMANDS, "hello")


def test_name_of_nobody() -> None:
    with pytest.raises(UsageError, match="unknown command 'sumbit'") as e:
        plugins.get(COMMANDS, "sumbit", "command")
    assert e.value.hint == "did you mean submit?"


def test_damaged_metadata(site: Path) -> None:
    """Of a package that has nothing to do with slurmft."""
    package(site, "odd", "")
    next(site.glob("odd-*/entry_points.txt")).write_bytes(b"\xff[slurmft.commands]\n")
    (site / "gone-1.dist-info").mkdir()
    (site / "gone-1.dist-info" / "entry_points.txt").symlink_to(site / "nowhere")
    assert plugins.find(COMMANDS, "hello") is None
