"""Fetches a run from a cluster. Its model, records, results and logs can then be listed, reported
and used here; of a program of your own that --on has sent, outputs/ of the run has what it wrote in
its folder. Of what is there, regular files come alone. The run is marked as one from elsewhere:
nothing of it is executed before you have seen that and agreed (`slurmft resume`).

examples:
  slurmft pull last --on juwels
  slurmft pull emotion-2026 --on juwels --into results    results/emotion-20261120-093012-a1b2c3
  slurmft pull 8123 --on juwels --checkpoints             its checkpoints and tokens, too
"""

import contextlib
import dataclasses
import glob
import os
import shlex
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.hints import command as command_line
from slurmft.cli.parser import Parser
from slurmft.core import filesystem, permissions, removal, users
from slurmft.core.below import is_below
from slurmft.core.decode import DecodeError, decode, decode_or_none
from slurmft.core.descent import is_new
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.program import OWN
from slurmft.core.run_files import FINAL_STATES, Transition
from slurmft.core.text import counted, in_bytes
from slurmft.core.trusted import MARK, Door
from slurmft.plugins.remote.clusters import named, word
from slurmft.plugins.remote.connection import entering, entering_own, was_cut
from slurmft.plugins.remote.forward import Forwarded
from slurmft.runs import origin
from slurmft.runs.origin import Origin
from slurmft.runs.rundir import RunDir

ELSEWHERE = Elsewhere.HERE

# Large, and of no use without the job: only a resume needs them. rsync: below the run's folder.
_LEFT_OUT = ("/checkpoints", "/tokens", "/submitit")
_ELSEWHERE = "give another folder: --into"
_NEVER = ("/submissions", f"/{MARK}", "/.secrets.*")
"""Links by which a job has the run there; what marks folders that slurmft has made here; and the
secrets of a job by mpirun."""
_LATEST_OUTPUT_S = 60
"""How long after the end of a run files may be written that count as its outputs."""
PULLED = Door(
    "the folder that takes a run of `slurmft pull`",
    "`runs/`, or `--into`",
    "what a pulled run is marked as",
    cure="give another folder: --into",
)


def parser() -> Parser:
    command = Parser("slurmft pull", __doc__).add_run()
    add = command.add_argument
    into = "folder here that takes the run's (default: runs)"
    add("--into", type=Path, default=Path("runs"), metavar="DIR", help=into)
    add("--checkpoints", action="store_true", help="also what only a resume needs")
    return command


@dataclass(frozen=True, kw_only=True, slots=True)
class _ProgramThere:
    """What is needed of a run's program; of another kind, settings may be anything."""

    kind: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunThere:
    """What is needed of a cluster's answer about a run."""

    path: str
    state: str
    history: list[Transition]
    program: _ProgramThere
    owner: str = ""
    """An older slurmft there does not say it."""
    is_own: bool = False
    inode: int | None = None

    @property
    def settings(self) -> "_Settings | None":
        """The settings of a program of the user's own; None: it is none."""
        if self.program.kind != OWN:
            return None
        return decode_or_none(self.program.settings, _Settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settings:
    """Where a program of the user's own ran, and where it wrote checkpoints."""

    folder: str
    checkpoint_dir: str | None = None


@contextlib.contextmanager
def _prepared(top: Path, came_from: Origin) -> Iterator[tuple[Path, Path]]:
    """Opens the folder that takes a run for the block, marked before any of its files comes.

    Yields:
        Its path; and one through this process's descriptor of it: where others can rename, another
        folder may have the name by the time that files come.

    Raises:
        UsageError: the run's name is none, or something else has its place.
    """
    name = Path(came_from.path).name
    where = f"{came_from.cluster}:{came_from.path}"
    if name.startswith(".") or not name.isprintable() or not name:
        raise UsageError(f"{where!r} has no name that a run could have", "rename it")
    into = top / name
    if os.path.lexists(into) and (into.is_symlink() or not _came_from(into, came_from)):
        raise _taken(into, where)
    permissions.settle(share_with_group=False)
    try:
        permissions.make_folder(into, share_with_group=False, exist_ok=True)
    except OSError as error:
        reason = filesystem.reason(error, into)
        raise UsageError(f"cannot make {str(into)!r}: {reason}", _ELSEWHERE) from None
    # Where others can write the folder above, one of them may have made it.
    with PULLED.folder(into) as folder:
        opened = Path(f"/proc/self/fd/{folder}")
        if not is_new(folder) and not _came_from(opened, came_from):
            raise _taken(into, where)
        origin.mark(opened, came_from)
        yield into, opened


def _taken(into: Path, where: str) -> UsageError:
    """Returns the error for a folder that a run cannot be fetched into: it has another."""
    problem = f"{str(into)!r} is there, and did not come from {where}"
    return UsageError(problem, _ELSEWHERE)


def _came_from(run: Path, came_from: Origin) -> bool:
    """Returns whether a run was fetched from the same place before."""
    before = origin.origin_of(run)
    return before is not None and (before.cluster, before.path) == (
        came_from.cluster,
        came_from.path,
    )


def _check_fetched(into: Path, opened: Path, came_from: Origin) -> None:
    """Raises SlurmftError where what was fetched is no run, and removes it."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(RunDir(opened).config.lstat().st_mode):
            return
    outcome = "what was fetched of it is removed"
    try:
        form = removal.exactly(into.name)
        removal.remove(into, form, at_once=True, inode=opened.stat().st_ino)
    except OSError as error:
        outcome = f"what was fetched of it stays: {error.strerror or error}"
    raise SlurmftError(
        f"{came_from.cluster}:{came_from.path} has no regular file {RunDir(into).config.name!r}: "
        f"it is no run, and {outcome}",
        f"the runs there: slurmft list --on {shlex.quote(came_from.cluster)}",
    )


def _status_there(status: Forwarded) -> _RunThere:
    """Returns what the cluster says of the run; its error is raised here, with its hint."""
    answer = status.answer()
    if answer.code:
        # Commands print errors in this form. Here the same will be printed once more.
        text = answer.stderr.strip().removeprefix("error: ")
        error, _, hint = text.partition("\nhint: ")
        raise SlurmftError(error, hint or None, answer.code)
    try:
        return decode(answer.json(status.cluster.name), _RunThere)
    except DecodeError as error:
        raise SlurmftError(
            f"the answer of {status.cluster.name} is none of slurmft status: {error}",
            "the same version of slurmft here and there",
        ) from None


def _origin(cluster: str, facts: _RunThere) -> Origin:
    return Origin(
        cluster=cluster,
        path=str(Path(facts.path)),
        owner=facts.owner,
        # The folder with this inode will be fetched, or none.
        is_own=facts.is_own and facts.inode is not None,
        user=users.user_name(os.getuid()),
        time=time.time(),
    )


def _rsync_options(checkpoints: bool) -> list[str]:
    # What a run is marked by is never what it brings along.
    # In upper and lower case: a file system here may not tell these apart.
    options = ["--exclude=/[oO][rR][iI][gG][iI][nN].[jJ][sS][oO][nN]"]
    names = [*_NEVER]
    if not checkpoints:
        names += _LEFT_OUT
    for name in names:
        options.append(f"--exclude={name}")
    return options


def _outputs_script(
    top: str, facts: _RunThere, settings: _Settings, checkpoints: bool
) -> str:
    """Returns the shell script that lists there what a program has written while its run was alive:
    the folder that --on has sent, then size and path of each file, with NULs between.

    It prints nothing where the program ran in another folder.
    """
    starts = [each.time for each in facts.history if each.state == "running"]
    if not starts:
        return "exit 0"
    # A site may keep its runs in the folder.
    others = [os.path.dirname(facts.path)]
    if settings.checkpoint_dir and not checkpoints:
        others.append(os.path.join(settings.folder, settings.checkpoint_dir))
    left_out = ["-name '.?*'", "-name __pycache__"]
    for path in others:
        pattern = glob.escape(os.path.normpath(path))
        left_out.append(f"-path {shlex.quote(pattern)}")
    # Not since the submission: the code may have been written just before.
    window = f"-newermt @{min(starts):.3f}"
    if facts.state in FINAL_STATES:
        end = int(facts.history[-1].time) + _LATEST_OUTPUT_S
        window += f" ! -newermt @{end}"
    pruned = " -o ".join(left_out)
    lines = [
        f"top=$(cd {word(top)} && pwd -P) && here={shlex.quote(settings.folder)}",
        'case "$here/" in "$top"/*) ;; *) exit 0;; esac',
        'below=${here#"$top"/}',
        'cd "$top/${below%%/*}" || exit 0',
        "printf '%s\\0' \"$PWD\"",
        rf'find "$PWD" -mindepth 1 -xdev \( {pruned} \) -prune \
            -o -type f {window} -printf "%s %P\\0"',
    ]
    return "\n".join(lines)


def _fetch_outputs(
    status: Forwarded,
    facts: _RunThere,
    settings: _Settings,
    into: Path,
    checkpoints: bool,
) -> str:
    """Fetches what a program of the user's own has written in the folder that --on has sent;
    returns what came, in words, or "" if there is nothing."""
    script = _outputs_script(status.cluster.folder, facts, settings, checkpoints)
    done = status.connection.run(script, capture=True)
    if was_cut(done):
        raise status.connection.no_connection(done)
    folder, *entries = done.stdout.split("\0")[:-1] or [""]
    sizes: dict[str, int] = {}
    for entry in entries:
        size, _, name = entry.partition(" ")
        # Whatever a cluster answers: its names lead out of no folder here.
        if size.isdecimal() and is_below(name):
            sizes[name] = int(size)
    if not sizes:
        return ""
    # It is the folder of the project: `--on` has made it.
    status.connection.fetch(entering_own(folder), into, names=sizes)
    return f"{counted(len(sizes), 'file')}, {in_bytes(sum(sizes.values()))}"


def _fetch(
    status: Forwarded,
    facts: _RunThere,
    came_from: Origin,
    into: Path,
    opened: Path,
    checkpoints: bool,
) -> None:
    """Fetches a run into a folder that `_prepared` has opened, and says what came."""
    options = _rsync_options(checkpoints)
    # A run of others has no inode, and is believed nothing.
    enter = entering(came_from.path, facts.inode)
    status.connection.fetch(enter, opened, *options)
    # Again: a file system without upper and lower case may have taken another for the mark.
    origin.mark(opened, came_from)
    _check_fetched(into, opened, came_from)
    print(f"fetched from {came_from.cluster}: {into}")
    if not came_from.is_own:
        owner = came_from.owner or "an unknown user"
        print(
            f"it belongs to {owner} there: slurmft resume shows first what it executes"
        )
    if (opened / "model").is_dir():
        print(f"its model: {into / 'model'}")
    settings = facts.settings
    # Somebody else's program may have named any folder.
    if came_from.is_own and settings is not None:
        outputs = _fetch_outputs(
            status, facts, settings, opened / "outputs", checkpoints
        )
        if outputs:
            print(f"its outputs: {outputs}: {into / 'outputs'}")
        if settings.checkpoint_dir and not checkpoints:
            print(_left_there(settings.folder, settings.checkpoint_dir))


def _left_there(folder: str, checkpoint_dir: str) -> str:
    """Returns a line about checkpoints that are not fetched: what a script saves at its end may be
    there, too."""
    # Outputs are looked for in the folder that was sent alone.
    place = os.path.normpath(os.path.join(folder, checkpoint_dir))
    if place.startswith(f"{folder}/"):
        return f"left there: {checkpoint_dir}; --checkpoints fetches it"
    return f"left there: {checkpoint_dir}"


def main(argv: list[str]) -> int:
    arguments = parser().parse(argv)
    if arguments.on is None:
        raise UsageError(
            "slurmft pull fetches from where?", "slurmft pull RUN --on CLUSTER"
        )
    clusters = named(arguments.on)
    if len(clusters) > 1:
        raise UsageError(f"--on {arguments.on}: a run is on one cluster", "name one")
    command = ["status", arguments.run, "--json"]
    if arguments.runs_dir:
        command += ["--runs-dir", arguments.runs_dir]
    # The cluster knows what "last" is, and where its runs are.
    status = Forwarded(clusters[0], command)
    facts = _status_there(status)
    came_from = _origin(clusters[0].name, facts)
    status.connection.command = command_line(
        "pull", arguments.run, "--on", arguments.on
    )
    # A second pull of a run goes on in the same folder, and fetches what is new.
    with _prepared(arguments.into, came_from) as (into, opened):
        _fetch(status, facts, came_from, into, opened, arguments.checkpoints)
    print(f"  slurmft report {shlex.quote(str(into))}")
    return Exit.OK
