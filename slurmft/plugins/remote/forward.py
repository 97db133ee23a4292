"""A command line that is typed here and runs on a cluster: `slurmft COMMAND ... --on CLUSTER`.

Sent are the snapshot of this folder, for commands that read it, and what their flags name; all else
means what is there. A submission carries a request of its own: if the connection is cut before its
answer is here, the same command again finds the run that the first has submitted.
"""

import contextlib
import hashlib
import itertools
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from slurmft.cli.commands import command_parser, load_command
from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.hints import typed
from slurmft.cli.parser import input_file, input_path
from slurmft.core import permissions, removal, trusted
from slurmft.core.credentials import redact
from slurmft.core.decode import read
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.files import parse_json, read_json, to_json, write_json
from slurmft.core.site import OPTIONS_OF_ON
from slurmft.core.text import screen_width, shown
from slurmft.plugins.remote.clusters import Cluster, clusters_file, named, word
from slurmft.plugins.remote.connection import (
    Connection,
    entering_own,
    was_cut,
)
from slurmft.programs import snapshot
from slurmft.runs.request import ON, REQUEST

InputType: TypeAlias = Callable[[str], str]
"""`input_path` or `input_file`: what a parser says of an argument that names a file to read."""
_NOT_FOUND = 127
"""A shell's exit code for a command that is not there."""
# A Python without slurmft ends sooner; what ran longer had it.
_START_S = 20
_DETACHED = 130
"""The exit code after Ctrl-C."""


def dispatch(argv: Sequence[str]) -> int | None:
    """Runs a command line with --on CLUSTER there, and returns its exit code; None where the
    command does its work here."""
    clusters, rest = split(argv)
    if not clusters or Elsewhere.HERE in behaviour(rest):
        return None
    return forward(clusters, rest)


def behaviour(argv: Sequence[str]) -> Elsewhere:
    """Returns what the command of a command line says of itself; nothing, if it is not installed
    here, or cannot be imported: the cluster may have it, as a plug-in."""
    if not argv:
        return Elsewhere.PLAIN
    try:
        module = load_command(argv[0])
    except SlurmftError:
        return Elsewhere.PLAIN
    # A plug-in's command need not say anything.
    behaviour_of_command: Elsewhere = getattr(module, "ELSEWHERE", Elsewhere.PLAIN)
    return behaviour_of_command


def split(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the value of --on ("" without one), and the command line without it."""
    # A program after "--" may have an --on of its own.
    typed, program = _split_program(argv)
    clusters = ""
    rest = []
    remaining = iter(typed)
    for text in remaining:
        flag, equals, value = text.partition("=")
        if flag != "--on":
            rest.append(text)
            continue
        clusters = value
        if not equals:
            clusters = next(remaining, "")
        if not clusters:
            raise UsageError("--on names no cluster", "slurmft list --on CLUSTER")
    return clusters, [*rest, *program]


def _split_program(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words for slurmft, and those of a program from "--" on."""
    if "--" not in argv:
        return list(argv), []
    end = argv.index("--")
    typed = list(argv[:end])
    program = list(argv[end:])
    return typed, program


def forward(names: str, argv: list[str]) -> int:
    """Runs a command on the clusters of these names; returns its exit code.

    Raises:
        UsageError: no such cluster, or the command is not for several.
        SlurmftError: there is no connection, or it was cut.
    """
    clusters = named(names)
    if len(clusters) == 1:
        return Forwarded(clusters[0], argv).run()
    if Elsewhere.SEVERAL not in behaviour(argv):
        command = argv[0] if argv else ""
        problem = f"slurmft {command} runs on one cluster"
        raise UsageError(f"--on {names}: {problem}", "name one")
    return _on_each(clusters, argv)


def _on_each(clusters: list[Cluster], argv: list[str]) -> int:
    """Runs a command on several clusters at once, and prints one answer after the other."""

    def answer_of(cluster: Cluster) -> Answer:
        return Forwarded(cluster, argv).answer()

    # A thread each: a cluster that is out of reach takes ssh's whole timeout.
    with ThreadPoolExecutor(len(clusters)) as pool:
        answers = list(pool.map(answer_of, clusters))
    # In the order in which the clusters were named, whoever answered first.
    values: dict[str, Any] = {}
    texts = []
    errors = []
    codes = []
    for cluster, answer in zip(clusters, answers, strict=True):
        codes.append(answer.code)
        values[cluster.name] = None
        try:
            values[cluster.name] = answer.json(cluster.name)
        except SlurmftError as error:
            # Otherwise it did not answer, and its stderr says why.
            if "--json" in argv and not answer.code:
                codes.append(error.code)
                lines = f"error: {error}".splitlines()
                errors += [f"{cluster.name}: {line}" for line in lines]
        texts.append(f"{cluster.name}\n{answer.stdout.rstrip()}")
        for line in answer.stderr.splitlines():
            errors.append(f"{cluster.name}: {line}")
    if "--json" in argv:
        print(to_json(values, indent=2))
    else:
        print("\n\n".join(texts))
    # What was printed comes before the errors, also where both go to one file.
    sys.stdout.flush()
    for line in errors:
        print(line, file=sys.stderr)
    # 0 only where all clusters have answered.
    return max(codes)


class Answer(NamedTuple):
    """Exit code and output of a command on a cluster."""

    code: int
    stdout: str
    stderr: str

    def json(self, cluster: str) -> Any:
        """Returns what a command with --json has printed.

        Raises:
            SlurmftError: it is no JSON.
        """
        try:
            return parse_json(self.stdout)
        except ValueError:
            first_line, _, _ = self.stdout.partition("\n")
            raise SlurmftError(
                f"the answer of {cluster} is no JSON; it begins with {shown(first_line)!r}",
                "where ~/.bashrc or ~/.profile print that there, let them do so in terminals "
                "alone: [ -t 1 ] && ...",
            ) from None


class Forwarded:
    """One command line for one cluster."""

    def __init__(self, cluster: Cluster, argv: list[str]) -> None:
        self.cluster = cluster
        line = shlex.join([*typed(), "--on", cluster.name, *argv])
        self.connection = Connection(cluster, redact(line))
        self.typed, self.program = _split_program(argv)
        """The words for slurmft, and those of a program from "--" on."""
        self.behaviour = behaviour(argv)
        self.syntax = Syntax.of(self.typed)
        self.words = list(_split_assignments(self.typed, self.syntax))
        """The words that the cluster gets: paths become those of what was sent."""
        self.here = Path.cwd().resolve()
        self.root, self.source = self._snapshot()
        name = self.root.name or "root"  # the name of / is empty
        path_hash = _hash_of_path(self.root)
        self.project = f"{cluster.folder}/{name}-{path_hash}"
        self.folder = self.project
        """Where the command runs there: as far below the project as it was typed here."""
        below = os.path.relpath(self.here, self.root)
        if below != ".":
            self.folder += f"/{below}"
        self.fetched: tuple[str, Path] | None = None
        """A folder there that is fetched, and the file here that --output names."""

    def run(self) -> int:
        """Sends, runs, and fetches; returns the exit code."""
        self._redirect_output()
        self._send()
        with self._request() as facts:
            began = time.monotonic()
            done = self.connection.run(self._script(facts))
            took_s = time.monotonic() - began
            if was_cut(done) or self._was_killed(done.returncode):
                raise self.connection.no_connection(done)
            lacks_slurmft = took_s < _START_S and self._lacks_slurmft(done.returncode)
            if done.returncode == _NOT_FOUND or lacks_slurmft:
                raise UsageError(
                    f"{self.cluster.name} cannot start {self.cluster.start}",
                    f"install slurmft there; python or uv in {clusters_file()} says where it is",
                )
        # The command has said why; what it may have written there is not whole.
        if done.returncode != Exit.OK:
            return done.returncode
        if self.fetched is not None:
            folder, into = self.fetched
            self.connection.fetch_output(folder, into)
            print(f"fetched from {self.cluster.name}: {into}")
        elif Elsewhere.SUBMITS in self.behaviour and "--follow" in self.words:
            command = ["slurmft", "pull", "last", "--on", self.cluster.name]
            pull = shlex.join(command)
            what = "model"
            if self.program:
                what = "outputs"
            print(f"to fetch {what} and records: {pull}")
        return done.returncode

    def answer(self) -> Answer:
        """Runs a command that only tells something. Without a connection, stderr says so."""
        try:
            done = self.connection.run(self._script({}), capture=True)
            if was_cut(done):
                raise self.connection.no_connection(done)
        except SlurmftError as error:
            return Answer(error.code, "", f"error: {error}")
        return Answer(done.returncode, done.stdout, done.stderr)

    def _lacks_slurmft(self, code: int) -> bool:
        """Returns whether a command failed because the Python there has no slurmft."""
        # The exit code of many failures: of these alone, one more call finds out.
        if code != 1:
            return False
        lines = [*self.cluster.setup, f"exec {self.cluster.start} --version"]
        done = self.connection.run("\n".join(lines), capture=True)
        return "No module named slurmft" in done.stderr

    def _was_killed(self, code: int) -> bool:
        """Returns whether a submission there was killed, as a shell counts it: it has no answer. A
        job that is followed may have such an exit code itself."""
        is_submission = Elsewhere.SUBMITS in self.behaviour
        is_by_signal = code > 128 and code != _DETACHED
        return is_submission and is_by_signal and "--follow" not in self.words

    # --- what is sent -----------------------------------------------------------------------------

    def _snapshot(self) -> tuple[Path, snapshot.Source | None]:
        """Returns the top of what this folder belongs to, and what of it is sent."""
        task = self._value("--task") or ""
        # MODULE:CLASS
        has_own_task = Elsewhere.SENDS_TASK in self.behaviour and ":" in task
        if Elsewhere.SENDS_FOLDER not in self.behaviour and not has_own_task:
            # Nothing is sent, but the command runs in the same folder there as those that send.
            _, root = snapshot.choose(self.here, "auto")
            return root.resolve(), None
        mode = self._value("--snapshot") or "auto"
        limit = self._value("--snapshot-limit-mb") or ""
        limit_mb = snapshot.LIMIT_MB
        # A limit that is no number is refused on the cluster, in the command's own words.
        if limit.isdecimal():
            limit_mb = int(limit)
        runs_dir = self.here / "runs"
        source = snapshot.source(self.here, mode, runs_dir=runs_dir, limit_mb=limit_mb)
        root = source.root.resolve()
        if source.mode == "none":  # the code is there already
            return root, None
        return root, source

    def _value(self, flag: str) -> str | None:
        """Returns what the command line gives for a flag; of several, the last counts."""
        value = None
        for text, following in itertools.pairwise([*self.words, ""]):
            if text == flag:
                value = following
            elif text.startswith(f"{flag}="):
                value = text.removeprefix(f"{flag}=")
        return value

    def _send(self) -> None:
        """Sends the snapshot and the inputs, and lets the command line name the inputs there."""
        code: list[str] = []
        if self.source:
            code += self.source.files
            self._say(f"sends {self.source.describe()}")
        # Before CLUSTER: is taken away: a path there is no input, even if this machine has it too.
        inputs = self._inputs()
        for number, _ in self._places():
            text = self.words[number]
            self.words[number] = self._without_cluster(text)
        names = list(code)
        for number, path, rest in inputs:
            self.words[number] = self._send_input(path, names) + rest
        if self.source and code:
            self._send_code(self.source)
        data = names[len(code) :]
        if data:
            self.connection.send(self.root, data, self.project, copy_links=True)
        if names:
            self._warn_of_left_out(names)

    def _send_code(self, source: snapshot.Source) -> None:
        """Sends the snapshot, and removes there what of an earlier one is not here any more."""
        project = _hash(self.project)
        record = _state_file("sent", f"{self.cluster.name}-{project}.json")
        # A record that is damaged, or of another version, counts as none.
        record_before = read(record, dict[str, list[str]])
        if record_before is None:
            record_before = {}
        names = list(source.files)
        to_send = dict.fromkeys(names)  # in their order, each once
        for name in record_before.get("names", []):
            # What was sent before and is not here any more is removed there.
            if not os.path.lexists(self.root / name):
                to_send[name] = None
        place = trusted.temporary_place()
        with tempfile.TemporaryDirectory(prefix="slurmft-code-", dir=place) as staged:
            # What was listed is what goes: where others can write, a link may have taken the place
            # of a folder by now, and rsync would send what lies behind it.
            snapshot.stage(source, Path(staged))
            self.connection.send(Path(staged), to_send, self.project)
        # Of the code alone: data may be of jobs that still wait.
        write_json(record, {"names": names})

    def _inputs(self) -> list[tuple[int, Path, str]]:
        """Returns number and path of each word that names a file or folder here, and what follows
        the path in it, as :0.2 in --mix DIR:0.2."""
        inputs = []
        for number, kind in self._places():
            text = self.words[number]
            # An empty word would be this folder; CLUSTER:PATH is a path there.
            if not text or self._without_cluster(text) != text:
                continue
            for name in _beginnings(text):
                path = _absolute(name)
                is_here = path.exists()
                if kind is input_file:
                    is_here = path.is_file()
                # What is not here is left to the cluster: the name of a model, a task or a run.
                if is_here:
                    inputs.append((number, path, text.removeprefix(name)))
                    break
        return inputs

    def _places(self) -> list[tuple[int, InputType]]:
        """Returns the numbers of the words that may name an input, each with the type of its
        argument."""
        places = []
        for number, flag in enumerate(self.words[:-1], start=1):
            takes_value = flag.startswith("--") and "=" not in flag
            if takes_value and flag not in self.syntax.switches:
                kind = self.syntax.inputs.get(flag)
            else:
                kind = self.syntax.argument
            if kind is not None:
                places.append((number, kind))
        return places

    def _without_cluster(self, text: str) -> str:
        """Returns PATH for CLUSTER:PATH, which names a path there; other texts as they are."""
        return text.removeprefix(f"{self.cluster.name}:")

    def _send_input(self, path: Path, names: list[str]) -> str:
        """Returns the path of an input there, from the folder where the command runs. Adds it to
        `names`, which are sent together, or sends it at once if it is not below the root."""
        # In the place of a link, the snapshot has the link.
        if path.is_relative_to(self.root) and not path.is_symlink():
            below = os.path.relpath(path, self.root)
            if not _covers(names, below):
                self._say(f"sends {path}")
                names.append(below)
            return os.path.relpath(path, self.here)
        self._say(f"sends {path}")
        path_hash = _hash_of_path(path.parent)
        folder = f"{self.cluster.folder}/inputs/{path_hash}"
        self.connection.send(path.parent, [path.name], folder, copy_links=True)
        place = f"{folder}/{path.name}"
        if place.startswith("/"):
            return place
        return os.path.relpath(place, self.folder)  # both are from the home folder

    def _warn_of_left_out(self, names: Sequence[str]) -> None:
        """Warns of files that the program's command line names, and the snapshot lacks."""
        for argument in self.program[1:]:  # without the "--" before it
            _, _, value = argument.rpartition("=")  # the file may be of --flag=FILE
            path = os.path.normpath(self.here / value)
            below = os.path.relpath(path, self.root)
            if not os.path.exists(path) or below == ".":
                continue
            reason = None
            if value.startswith("/"):
                # It means a place there; one of the home folder is rather meant here.
                if path.startswith(f"{Path.home()}/"):
                    reason = "an absolute path means a place there"
            elif below.startswith(".."):
                reason = f"it lies outside of the folder that is sent, {self.root}"
            elif not _covers(names, below):
                reason = "it is not in the snapshot (ignored by git?)"
            if reason is not None:
                self._say(f"{argument} is not sent: {reason}")

    def _say(self, words: str) -> None:
        # stderr: stdout is for what the command prints there, such as JSON.
        text = redact(words)
        line = f"{self.cluster.name}: {text}"
        print(line, file=sys.stderr, flush=True)

    # --- what runs --------------------------------------------------------------------------------

    def _redirect_output(self) -> None:
        """Lets the command write to a folder there what --output names here; it is fetched."""
        is_of_job = Elsewhere.JOB_OUTPUT in self.behaviour
        if is_of_job and "--follow" not in self.words:  # it is written later
            return
        output = self._value("--output")
        if output is None and is_of_job:
            output = self._predictions()
        if output is None:
            return
        into = Path(output).expanduser().absolute()
        path_hash = _hash_of_path(into)
        place = f"{self.cluster.folder}/outputs/{path_hash}"
        file = f"{place}/{into.name}"
        there = os.path.relpath(file, self.folder)
        self.words += ["--output", there]  # of two, the last counts
        self.fetched = place, into

    def _predictions(self) -> str:
        """Returns the name of the file that the job writes, if none is named."""
        name = "predictions.csv"
        for each in self.typed[1:]:
            data = Path(each)
            if data.is_file():  # of several, the last is the data: RUN comes before it
                name = f"{data.stem}.predictions{data.suffix}"
        if os.path.exists(name) and "--overwrite" not in self.words:
            raise UsageError(f"{name!r} is there", "--overwrite, or another --output")
        self.words.append("--overwrite")  # what an earlier command has left there
        return name

    def _script(self, facts: dict[str, Any]) -> str:
        """Returns the script that a shell there runs; `facts` are those of the request."""
        runs_dir = f"{self.cluster.folder}/runs"
        # The shell makes folders from the home folder; slurmft runs in the project.
        if not runs_dir.startswith(("/", "~")):
            runs_dir = f"~/{runs_dir}"
        site = {"runs_dir": runs_dir} | self.cluster.site
        variables = {ON: self.cluster.name, OPTIONS_OF_ON: json.dumps(site)}
        if facts:
            variables[REQUEST] = json.dumps(facts)
        # Answers of several clusters are captured: there is no terminal to ask there.
        if Elsewhere.SEVERAL in self.behaviour and sys.stdout.isatty():
            variables["COLUMNS"] = str(screen_width())
        lines = []
        if self.fetched:
            lines.append(f"( {entering_own(self.fetched[0])} ) || exit 2")
        # Again: where others can rename, theirs may have the name by then.
        lines.append(f"{{ {entering_own(self.project)}; }} || exit 2")
        # Afterwards: where a link of others is on the way, nothing is made. Who shares the folder
        # of runs may have made it.
        lines.append(f"mkdir -p {word(runs_dir)} || exit 2")
        below = shlex.quote(os.path.relpath(self.folder, self.project))
        lines.append(f"mkdir -p -- {below} && CDPATH= cd -- {below} || exit 2")
        for name, text in variables.items():
            value = shlex.quote(text)
            lines.append(f"export {name}={value}")
        lines += self.cluster.setup
        # exec: no shell stays between the connection and slurmft.
        arguments = shlex.join([*self.words, *self.program])
        lines.append(f"exec {self.cluster.start} {arguments}")
        return "\n".join(lines)

    @contextlib.contextmanager
    def _request(self) -> Iterator[dict[str, Any]]:
        """Yields what a submission says of itself; nothing for other commands.

        Its id is kept until there is an answer: if the connection is cut or this machine fails, the
        same command has the same id again.
        """
        if Elsewhere.SUBMITS not in self.behaviour:
            yield {}
            return
        # With or without --follow, it is the same submission.
        typed = [word for word in self.typed if word != "--follow"]
        # The folder counts: the same command in another one submits other code.
        key = _hash(
            self.cluster.name,
            str(self.here),
            *typed,
            *self.program,
        )
        record = _state_file("requests", f"{key}.json")
        facts = read_json(record) or {}
        if not isinstance(facts.get("id"), str):  # there is no record, or it is damaged
            request_id = os.urandom(16).hex()
            facts = {"id": request_id, "time": time.time()}
        # Before the command runs: from then on the cluster may have the run.
        write_json(record, facts)
        command = ["slurmft", "--on", self.cluster.name, *self.typed, *self.program]
        command_line = shlex.join(command)
        host = os.uname().nodename
        request = {
            "request": facts["id"],
            # it is kept in the run, which others may read
            "command": redact(command_line),
            "sender": f"{host}:{self.here}",
        }
        # There it has no history: only this machine knows the commit.
        if self.source and self.source.mode == "git":
            is_dirty = self.source.changed > 0
            request["git"] = {"commit": self.source.commit, "dirty": is_dirty}
        yield request
        # Not reached where the block raises, as without a connection: the id is kept then.
        removal.discard(record, removal.exactly(record.name))


@dataclass(frozen=True)
class Syntax:
    """The flags and the argument of a command that matter for sending, as its parser has them."""

    switches: frozenset[str] = frozenset()
    """Flags that take no value."""
    inputs: dict[str, InputType] = field(default_factory=dict)
    """Flag that names a file or folder to read -> `input_path` or `input_file`."""
    argument: InputType | None = None
    """`input_path` or `input_file` for an argument without a flag; None: the command reads none."""

    @classmethod
    def of(cls, argv: Sequence[str]) -> "Syntax":
        """Returns the syntax of the command that a command line names; that of a command which is
        not installed here is empty."""
        parser = None
        if argv:
            # The cluster may have a command that is not here, as a plug-in.
            with contextlib.suppress(SlurmftError):
                parser = command_parser(argv)
        if parser is None:
            return cls()
        switches: list[str] = []
        inputs: dict[str, InputType] = {}
        argument = None
        for action in parser.arguments():
            if action.nargs == 0:
                switches += action.option_strings
            elif action.type not in (input_path, input_file):
                continue
            elif action.option_strings:
                inputs |= dict.fromkeys(action.option_strings, action.type)
            else:
                argument = action.type
        return cls(frozenset(switches), inputs, argument)


def _split_assignments(words: Sequence[str], syntax: Syntax) -> Iterator[str]:
    """Yields the words, with --flag=value as two words where the value names an input."""
    for each in words:
        flag, equals, value = each.partition("=")
        if equals and flag in syntax.inputs:
            yield flag
            yield value
        else:
            yield each


def _absolute(name: str) -> Path:
    """Returns the path of a file, without ".." and without links above it: what is beside the
    project is not below it. The file itself may be a link: it keeps its name."""
    path = os.path.expanduser(name).rstrip("/") or "/"
    above, last = os.path.split(path)
    if last in ("", ".", ".."):
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(above), last)


def _beginnings(text: str) -> Iterator[str]:
    """Yields a text, and what of it stands before each colon, the longest first: a path may have
    colons itself."""
    while text:
        yield text
        text, _, _ = text.rpartition(":")


def _state_file(*names: str) -> Path:
    """Returns a file of the state that is kept here of what was done there; makes its folder."""
    top = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    path = Path(top, "slurmft", *names).expanduser()
    permissions.make_folder(path.parent, share_with_group=False, exist_ok=True)
    return path


def _covers(names: Sequence[str], path: str) -> bool:
    """Returns whether a path, or something below it, is among names."""
    below = f"{path}/"
    return any(name == path or name.startswith(below) for name in names)


def _hash_of_path(path: Path) -> str:
    """Returns a name for a path of this machine. Folders of the same name, here or on another
    machine, must not overwrite each other on the cluster."""
    host = os.uname().nodename
    return _hash(host, str(path))


def _hash(*words: str) -> str:
    # A file's name may be no UTF-8: Python then has surrogates in its place.
    text = "\0".join(words).encode("utf-8", "surrogateescape")
    return hashlib.sha256(text).hexdigest()[:10]
