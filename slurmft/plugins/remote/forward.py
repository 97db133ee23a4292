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
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft.cli import command_parser
from slurmft.cli.parser import input_file, input_path
from slurmft.core.credentials import redact
from slurmft.core.decode import matches, read
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.files import read_json, write_json
from slurmft.core.site import OPTIONS_OF_ON
from slurmft.plugins.remote.clusters import Cluster, clusters_file, named, word
from slurmft.plugins.remote.connection import CUT, Connection
from slurmft.programs import snapshot
from slurmft.runs.request import ON, REQUEST

SUBMITS = ("submit", "run", "resume", "predict")
READS_FOLDER = ("run", "study")
"""Commands that run what is in this folder; so does `submit` with a task of one's own."""
LISTS = ("list", "doctor")
"""Commands that may be for several clusters."""
HERE = ("completion", "pull")
"""Commands that do their work here."""
_NOT_FOUND = 127
"""A shell's exit code for a command that is not there."""


def dispatch(argv: Sequence[str]) -> int | None:
    """Runs a command line with --on CLUSTER there, and returns its exit code; None where the
    command does its work here."""
    clusters, rest = split(argv)
    if not clusters or rest[:1] in [[name] for name in HERE]:
        return None
    return forward(clusters, rest)


def split(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the value of --on ("" without one), and the command line without it."""
    end = argv.index("--") if "--" in argv else len(argv)  # the rest is a program's
    clusters = ""
    rest = []
    words = iter(argv[:end])
    for text in words:
        flag, equals, value = text.partition("=")
        if flag != "--on":
            rest.append(text)
            continue
        clusters = value if equals else next(words, "")
        if not clusters:
            raise UsageError("--on names no cluster", "slurmft list --on CLUSTER")
    return clusters, [*rest, *argv[end:]]


def forward(names: str, argv: list[str]) -> int:
    """Runs a command on the clusters of these names; returns its exit code.

    Raises:
        UsageError: no such cluster, or the command is not for several.
        SlurmftError: there is no connection, or it was cut.
    """
    clusters = named(names)
    command = argv[0] if argv else ""
    if len(clusters) == 1:
        return Forwarded(clusters[0], argv).run()
    if command not in LISTS:
        raise UsageError(f"--on {names}: slurmft {command} runs on one cluster", "name one")
    return _on_each(clusters, argv)


def _on_each(clusters: list[Cluster], argv: list[str]) -> int:
    """Runs a command on several clusters at once, and prints one answer after the other."""
    with ThreadPoolExecutor(len(clusters)) as pool:
        answers = list(pool.map(lambda c: Forwarded(c, argv).answer(), clusters))
    by_name = {cluster.name: answer for cluster, answer in zip(clusters, answers, strict=True)}
    if "--json" in argv:
        values = {name: _parse_json(out) for name, (_, out, _) in by_name.items()}
        print(json.dumps(values, indent=2, ensure_ascii=False))
    else:
        texts = [f"{name}\n{out.rstrip()}" for name, (_, out, _) in by_name.items()]
        print("\n\n".join(texts), flush=True)
    for name, (_, _, err) in by_name.items():
        for line in err.splitlines():
            print(f"{name}: {line}", file=sys.stderr)
    return max(code for code, _, _ in answers)


def _parse_json(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return None  # the cluster did not answer: stderr says why


class Forwarded:
    """One command line for one cluster."""

    def __init__(self, cluster: Cluster, argv: list[str]) -> None:
        self.cluster = cluster
        self.connection = Connection(cluster)
        end = argv.index("--") if "--" in argv else len(argv)
        self.typed = argv[:end]
        self.program = argv[end:]
        self.command = argv[0] if argv else ""
        self.syntax = Syntax.of(self.typed)
        self.words = list(_apart(self.typed, self.syntax))
        self.here = Path.cwd().resolve()
        self.root, self.source = self._snapshot()
        project = f"{self.root.name or 'root'}-{_hash(os.uname().nodename, str(self.root))}"
        self.project = f"{cluster.folder}/{project}"
        below = os.path.relpath(self.here, self.root)
        self.folder = self.project if below == "." else f"{self.project}/{below}"
        """Where the command runs there."""
        self.fetched: tuple[str, Path] | None = None

    def run(self) -> int:
        """Sends, runs, and fetches; returns the exit code."""
        self._redirect_output()
        self._send()
        with self._request() as facts:
            done = self.connection.run(self._script(facts))
            if done.returncode == CUT:
                raise self.connection.no_connection()
            if done.returncode == _NOT_FOUND:
                raise UsageError(
                    f"{self.cluster.name} cannot start {self.cluster.start}",
                    f"install slurmft there; python or uv in {clusters_file()} says where it is",
                )
        if done.returncode != Exit.OK:
            return done.returncode
        if self.fetched is not None:
            folder, into = self.fetched
            self.connection.fetch(folder, into.parent)
            print(f"fetched from {self.cluster.name}: {into}")
        elif self.command in SUBMITS and "--follow" in self.words:
            run = shlex.join(["slurmft", "pull", "last", "--on", self.cluster.name])
            print(f"to fetch model and records: {run}")
        return done.returncode

    def answer(self) -> tuple[int, str, str]:
        """Runs a command that only tells something; returns its exit code, stdout and stderr."""
        done = self.connection.run(self._script({}), capture=True)
        if done.returncode == CUT:
            return Exit.SUBMIT, "", f"error: {self.connection.no_connection(done.stderr)}"
        return done.returncode, done.stdout, done.stderr

    # --- what is sent -----------------------------------------------------------------------------

    def _snapshot(self) -> tuple[Path, snapshot.Source | None]:
        """Returns the top of what this folder belongs to, and what of it is sent."""
        has_own_task = self.command == "submit" and ":" in (self._value("--task") or "")
        if self.command not in READS_FOLDER and not has_own_task:
            return snapshot.choose(self.here, "auto")[1].resolve(), None
        mode = self._value("--snapshot") or "auto"
        limit = self._value("--snapshot-limit-mb")
        # A limit that is no number is refused on the cluster, in the command's own words.
        limit_mb = int(limit) if limit and limit.isdecimal() else snapshot.LIMIT_MB
        runs_dir = self.here / "runs"
        source = snapshot.source(self.here, mode, runs_dir=runs_dir, limit_mb=limit_mb)
        return source.root.resolve(), None if source.mode == "none" else source

    def _value(self, flag: str) -> str | None:
        """Returns what the command line gives for a flag; of several, the last counts."""
        return dict(itertools.pairwise(self.words)).get(flag)

    def _send(self) -> None:
        names = list(self.source.files) if self.source else []
        if self.source:
            self._say(f"sends {self.source.describe()}")
        for number, path in self._inputs():
            self.words[number] = self._send_input(path, names)
        if not names:
            return
        record = _state("sent", f"{self.cluster.name}-{_hash(self.project)}.json")
        sent = (read(record, dict[str, list[str]]) or {}).get("names", [])
        # What was sent before and is not here any more is removed there.
        gone = [name for name in sent if not os.path.lexists(self.root / name)]
        self.connection.send(self.root, list(dict.fromkeys([*names, *gone])), self.project)
        if self.source:  # of the code alone: data may be of jobs that still wait
            write_json(record, {"names": list(self.source.files)})
        self._warn_of_left_out(names)

    def _inputs(self) -> Iterator[tuple[int, Path]]:
        """Yields number and path of each word of the command line that names a file or folder here.
        CLUSTER:PATH is a path there."""
        for number, (flag, text) in enumerate(itertools.pairwise(self.words), start=1):
            takes_value = flag.startswith("--") and "=" not in flag
            if takes_value and flag not in self.syntax.switches:
                kind = self.syntax.inputs.get(flag)
            else:
                kind = self.syntax.argument
            if kind is None:
                continue
            there = text.removeprefix(f"{self.cluster.name}:")
            if there != text:
                self.words[number] = there
                continue
            path = Path(text).expanduser().absolute()
            is_here = path.is_file() if kind is input_file else path.exists()
            if text and is_here:
                yield number, path

    def _send_input(self, path: Path, names: list[str]) -> str:
        """Sends an input; returns its path there, from the folder where the command runs."""
        if path.is_relative_to(self.root):
            below = os.path.relpath(path, self.root)
            if not _covers(names, below):
                self._say(f"sends {path}")
                names.append(below)
            return os.path.relpath(path, self.here)
        self._say(f"sends {path}")
        folder = f"{self.cluster.folder}/inputs/{_hash(os.uname().nodename, str(path.parent))}"
        self.connection.send(path.parent, [path.name], folder)
        place = f"{folder}/{path.name}"
        return place if place.startswith("/") else os.path.relpath(place, self.folder)

    def _warn_of_left_out(self, names: Sequence[str]) -> None:
        """Warns of files that the program's command line names, and the snapshot lacks."""
        for argument in self.program[1:]:
            path = os.path.normpath(self.here / argument.rpartition("=")[2])
            below = os.path.relpath(path, self.root)
            if argument.startswith("/") or below.startswith("..") or not os.path.exists(path):
                continue
            if below != "." and not _covers(names, below):
                self._say(f"{argument} is not sent: it is not in the snapshot (ignored by git?)")

    def _say(self, words: str) -> None:
        print(f"{self.cluster.name}: {redact(words)}", file=sys.stderr, flush=True)

    # --- what runs --------------------------------------------------------------------------------

    def _redirect_output(self) -> None:
        """Lets the command write to a folder there what --output names here; it is fetched."""
        is_prediction = self.command == "predict"
        if is_prediction and "--follow" not in self.words:  # it is written later
            return
        output = self._value("--output")
        if output is None and is_prediction:
            output = self._predictions()
        if output is None:
            return
        into = Path(output).expanduser().absolute()
        place = f"{self.cluster.folder}/outputs/{_hash(os.uname().nodename, str(into))}"
        there = os.path.relpath(f"{place}/{into.name}", self.folder)
        self.words += ["--output", there]  # of two, the last counts
        self.fetched = place, into

    def _predictions(self) -> str:
        """Returns the name of the file that `predict` writes, if none is named."""
        files = [Path(word) for word in self.typed[1:] if Path(word).is_file()]
        name = f"{files[-1].stem}.predictions{files[-1].suffix}" if files else "predictions.csv"
        if os.path.exists(name) and "--overwrite" not in self.words:
            raise UsageError(f"{name!r} is there", "--overwrite, or another --output")
        self.words.append("--overwrite")  # what an earlier command has left there
        return name

    def _script(self, facts: dict[str, Any]) -> str:
        """Returns the script that a shell there runs; `facts` are those of the request."""
        top = self.cluster.folder
        runs_dir = f"{top}/runs" if top.startswith(("/", "~")) else f"~/{top}/runs"
        folders = [self.folder, f"{top}/runs"]
        if self.fetched:
            folders.append(self.fetched[0])
        site = {"runs_dir": runs_dir} | self.cluster.site
        variables = {ON: self.cluster.name, OPTIONS_OF_ON: json.dumps(site)}
        if facts:
            variables[REQUEST] = json.dumps(facts)
        if self.command in LISTS and sys.stdout.isatty():
            variables["COLUMNS"] = str(shutil.get_terminal_size().columns)
        lines = [
            f"mkdir -p {' '.join(map(word, folders))} && cd {word(self.folder)} || exit",
            *(f"export {name}={shlex.quote(text)}" for name, text in variables.items()),
            *self.cluster.setup,
            f"exec {self.cluster.start} {shlex.join([*self.words, *self.program])}",
        ]
        return "\n".join(lines)

    @contextlib.contextmanager
    def _request(self) -> Iterator[dict[str, Any]]:
        """Yields what a submission says of itself; nothing for other commands.

        Its id is kept until there is an answer: if the connection is cut or this machine fails, the
        same command has the same id again.
        """
        if self.command not in SUBMITS:
            yield {}
            return
        typed = [word for word in self.typed if word != "--follow"]
        key = _hash(self.cluster.name, str(self.here), *typed, *self.program)
        record = _state("requests", f"{key}.json")
        kept = read_json(record)
        if not matches((kept or {}).get("id"), str):
            kept = None
        facts = kept or {"id": os.urandom(16).hex(), "time": time.time()}
        write_json(record, facts)
        words = ["slurmft", "--on", self.cluster.name, *self.typed, *self.program]
        request = {
            "request": facts["id"],
            "command": redact(shlex.join(words)),
            "from": f"{os.uname().nodename}:{self.here}",
        }
        if self.source and self.source.mode == "git":
            request["git"] = {"commit": self.source.commit, "dirty": self.source.changed > 0}
        yield request
        record.unlink(missing_ok=True)


@dataclass(frozen=True)
class Syntax:
    """What the parser of a command says of its words."""

    switches: frozenset[str] = frozenset()
    """Flags that take no value."""
    inputs: dict[str, Callable[[str], str]] = field(default_factory=dict)
    """Flag that names a file or folder to read -> `input_path` or `input_file`."""
    argument: Callable[[str], str] | None = None
    """The same of an argument without a flag; None: the command reads none."""

    @classmethod
    def of(cls, argv: Sequence[str]) -> "Syntax":
        """Returns the syntax of the command that a command line names; that of a command which is
        not installed here is empty."""
        try:
            parser = command_parser(argv) if argv else None
        except SlurmftError:  # the cluster may have it, as a plug-in
            parser = None
        switches: list[str] = []
        inputs: dict[str, Callable[[str], str]] = {}
        argument = None
        for action in parser.arguments() if parser else ():
            if action.nargs == 0:
                switches += action.option_strings
            elif action.type not in (input_path, input_file):
                continue
            elif action.option_strings:
                inputs |= dict.fromkeys(action.option_strings, action.type)
            else:
                argument = action.type
        return cls(frozenset(switches), inputs, argument)


def _apart(words: Sequence[str], syntax: Syntax) -> Iterator[str]:
    """--flag=value as two words, of the flags whose values are looked at here."""
    looked_at = (*syntax.inputs, "--output", "--snapshot", "--snapshot-limit-mb")
    for each in words:
        flag, equals, value = each.partition("=")
        yield from (flag, value) if equals and flag in looked_at else (each,)


def _state(*names: str) -> Path:
    """Returns a file of the state that is kept here of what was done there; makes its folder."""
    top = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    path = Path(top, "slurmft", *names).expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def _covers(names: Sequence[str], path: str) -> bool:
    """Returns whether a path, or something below it, is among names."""
    return any(name == path or name.startswith(f"{path}/") for name in names)


def _hash(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()[:10]
