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
    """The value of --on, "" without one, and the command line without it."""
    own = list(argv[: argv.index("--")] if "--" in argv else argv)
    found, rest = "", []
    words = iter(own)
    for each in words:
        if each != "--on" and not each.startswith("--on="):
            rest.append(each)
        elif not (found := next(words, "") if each == "--on" else each.removeprefix("--on=")):
            raise UsageError("--on names no cluster", "slurmft list --on CLUSTER")
    return found, [*rest, *argv[len(own) :]]


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
    if "--json" in argv:
        found = {c.name: _loaded(out) for c, (_, out, _) in zip(clusters, answers, strict=True)}
        print(json.dumps(found, indent=2, ensure_ascii=False))
    for number, (cluster, (_, out, err)) in enumerate(zip(clusters, answers, strict=True)):
        if "--json" not in argv:
            print("\n" * (number > 0) + f"{cluster.name}\n{out.rstrip()}", flush=True)
        print("".join(f"{cluster.name}: {x}\n" for x in err.splitlines()), end="", file=sys.stderr)
    return max(code for code, _, _ in answers)


def _loaded(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return None  # the cluster did not answer: stderr says why


class Forwarded:
    """One command line for one cluster."""

    def __init__(self, cluster: Cluster, argv: list[str]) -> None:
        self.cluster, self.connection = cluster, Connection(cluster)
        end = argv.index("--") if "--" in argv else len(argv)
        self.typed, self.program = argv[:end], argv[end:]
        self.command = argv[0] if argv else ""
        self.syntax = Syntax.of(self.typed)
        self.words = list(_apart(self.typed, self.syntax))
        self.here = Path.cwd().resolve()
        self.root, self.found = self._snapshot()
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
        if self.fetched is not None and done.returncode == Exit.OK:
            folder, into = self.fetched
            self.connection.fetch(folder, into.parent)
            print(f"fetched from {self.cluster.name}: {into}")
        elif self.command in SUBMITS and "--follow" in self.words and done.returncode == Exit.OK:
            run = shlex.join(["slurmft", "pull", "last", "--on", self.cluster.name])
            print(f"to fetch model and records: {run}")
        return done.returncode

    def answer(self) -> tuple[int, str, str]:
        """The exit code, and what is printed there, of a command that only tells something."""
        done = self.connection.run(self._script({}), capture=True)
        if done.returncode == CUT:
            return Exit.SUBMIT, "", f"error: {self.connection.no_connection(done.stderr)}"
        return done.returncode, done.stdout, done.stderr

    # --- what is sent -----------------------------------------------------------------------------

    def _snapshot(self) -> tuple[Path, snapshot.Source | None]:
        """The folder that this one belongs to, and what of it is sent."""
        mode, limit = self._value("--snapshot") or "auto", self._value("--snapshot-limit-mb")
        is_own = self.command == "submit" and ":" in (self._value("--task") or "")
        if self.command in READS_FOLDER or is_own:
            limit_mb = int(limit) if limit and limit.isdecimal() else snapshot.LIMIT_MB
            runs = self.here / "runs"
            found = snapshot.source(self.here, mode, runs_dir=runs, limit_mb=limit_mb)
            return found.root.resolve(), None if found.mode == "none" else found
        return snapshot.choose(self.here, "auto")[1].resolve(), None

    def _value(self, flag: str) -> str | None:
        """What the command line gives for a flag; of several, the last counts."""
        return dict(itertools.pairwise(self.words)).get(flag)

    def _send(self) -> None:
        names = list(self.found.files) if self.found else []
        if self.found:
            self._say(f"sends {self.found.describe()}")
        for number, path in self._inputs():
            self.words[number] = self._send_input(path, names)
        if not names:
            return
        record = _state("sent", f"{self.cluster.name}-{_hash(self.project)}.json")
        sent = (read(record, dict[str, list[str]]) or {}).get("names", [])
        gone = [n for n in sent if n not in set(names) and not os.path.lexists(self.root / n)]
        self.connection.send(self.root, [*names, *gone], self.project)
        if self.found:  # of the code alone: data may be of jobs that still wait
            write_json(record, {"names": list(self.found.files)})
        self._warn_of_left_out(names)

    def _inputs(self) -> Iterator[tuple[int, Path]]:
        """The words of the command line that name files or folders here: their number, and the
        path. CLUSTER:PATH is a path there."""
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
            if not any(n == below or n.startswith(f"{below}/") for n in names):
                self._say(f"sends {path}")
                names.append(below)
            return os.path.relpath(path, self.here)
        self._say(f"sends {path}")
        folder = f"{self.cluster.folder}/inputs/{_hash(os.uname().nodename, str(path.parent))}"
        self.connection.send(path.parent, [path.name], folder)
        place = f"{folder}/{path.name}"
        return place if place.startswith("/") else os.path.relpath(place, self.folder)

    def _warn_of_left_out(self, names: Sequence[str]) -> None:
        """Names what a program's command line names, and the snapshot lacks."""
        for each in self.program[1:]:
            path = os.path.normpath(self.here / each.rpartition("=")[2])
            below = os.path.relpath(path, self.root)
            if each.startswith("/") or below.startswith("..") or not os.path.exists(path):
                continue
            if below != "." and not any(n == below or n.startswith(f"{below}/") for n in names):
                self._say(f"{each} is not sent: it is not in the snapshot (ignored by git?)")

    def _say(self, words: str) -> None:
        print(f"{self.cluster.name}: {redact(words)}", file=sys.stderr, flush=True)

    # --- what runs --------------------------------------------------------------------------------

    def _redirect_output(self) -> None:
        """Lets the command write there what --output names here; it is fetched."""
        is_prediction = self.command == "predict"
        if is_prediction and "--follow" not in self.words:  # it is written later
            return
        given = self._value("--output") or (self._predictions() if is_prediction else None)
        if given is None:
            return
        into = Path(given).expanduser().absolute()
        place = f"{self.cluster.folder}/outputs/{_hash(os.uname().nodename, str(into))}"
        there = os.path.relpath(f"{place}/{into.name}", self.folder)
        self.words += ["--output", there]  # of two, the last counts
        self.fetched = place, into

    def _predictions(self) -> str:
        """The file that `predict` writes, if none is named."""
        files = [Path(word) for word in self.typed[1:] if Path(word).is_file()]
        name = f"{files[-1].stem}.predictions{files[-1].suffix}" if files else "predictions.csv"
        if os.path.exists(name) and "--overwrite" not in self.words:
            raise UsageError(f"{name!r} is there", "--overwrite, or another --output")
        self.words.append("--overwrite")  # what an earlier command has left there
        return name

    def _script(self, facts: dict[str, Any]) -> str:
        """What a shell there runs."""
        top = self.cluster.folder
        runs = f"{top}/runs" if top.startswith(("/", "~")) else f"~/{top}/runs"
        made = [self.folder, f"{top}/runs", *([self.fetched[0]] if self.fetched else [])]
        site = {"runs_dir": runs} | self.cluster.site
        variables: dict[str, Any] = {ON: self.cluster.name, OPTIONS_OF_ON: site}
        variables |= {REQUEST: facts} if facts else {}
        if self.command in LISTS and sys.stdout.isatty():
            variables["COLUMNS"] = str(shutil.get_terminal_size().columns)
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in variables.items()}
        lines = [
            f"mkdir -p {' '.join(word(each) for each in made)} && cd {word(self.folder)} || exit",
            *(f"export {name}={shlex.quote(text)}" for name, text in texts.items()),
            *self.cluster.setup,
            f"exec {self.cluster.start} {shlex.join([*self.words, *self.program])}",
        ]
        return "\n".join(lines)

    @contextlib.contextmanager
    def _request(self) -> Iterator[dict[str, Any]]:
        """What a submission says of itself. Its id is kept until there is an answer: the same
        command has the same id again, if the connection is cut or this machine fails."""
        if self.command not in SUBMITS:
            yield {}
            return
        asked = [word for word in self.typed if word != "--follow"]
        key = _hash(self.cluster.name, str(self.here), *asked, *self.program)
        record = _state("requests", f"{key}.json")
        kept = read_json(record)
        if not matches((kept or {}).get("id"), str):
            kept = None
        facts = kept or {"id": os.urandom(16).hex(), "time": time.time()}
        write_json(record, facts)
        git = self.found if self.found and self.found.mode == "git" else None
        words = ["slurmft", "--on", self.cluster.name, *self.typed, *self.program]
        yield {
            "request": facts["id"],
            "command": redact(shlex.join(words)),
            "from": f"{os.uname().nodename}:{self.here}",
        } | ({"git": {"commit": git.commit, "dirty": git.changed > 0}} if git else {})
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
    """A file of what is known here of what was done there."""
    top = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    path = Path(top, "slurmft", *names).expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def _hash(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()[:10]
