"""Fetches a run from a cluster. Its model, records, results and logs can then be listed, reported
and used here.

examples:
  slurmft pull last --on juwels
  slurmft pull emotion-2026 --on juwels --into results    results/emotion-20261120-093012-a1b2c3
  slurmft pull 8123 --on juwels --checkpoints             its checkpoints and tokens, too
"""

import json
import shlex
from pathlib import Path

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.plugins.remote.clusters import named
from slurmft.plugins.remote.forward import Forwarded

ELSEWHERE = Elsewhere.HERE

# Large, and of no use without the job: only a resume needs them. rsync: below the run's folder.
_LEFT_OUT = ("/checkpoints", "/tokens", "/submitit")


def parser() -> Parser:
    command = Parser("slurmft pull", __doc__).add_run()
    add = command.add_argument
    into = "folder here that takes the run's (default: runs)"
    add("--into", type=Path, default=Path("runs"), metavar="DIR", help=into)
    add("--checkpoints", action="store_true", help="also what only a resume needs")
    return command


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
    answer = status.answer()
    if answer.code:
        # The cluster's error becomes ours, with its hint.
        text = answer.stderr.strip().removeprefix("error: ")
        error, _, hint = text.partition("\nhint: ")
        raise SlurmftError(error, hint or None, answer.code)
    status_there = json.loads(answer.stdout)
    path = Path(status_there["path"])
    exclusions: list[str] = []
    if not arguments.checkpoints:
        exclusions = [f"--exclude={name}" for name in _LEFT_OUT]
    # A second pull of a run goes on in the same folder, and fetches what is new.
    into = arguments.into / path.name
    status.connection.fetch(str(path), into, *exclusions)
    print(f"fetched from {clusters[0].name}: {into}")
    if (into / "model").is_dir():
        print(f"its model: {into / 'model'}")
    print(f"  slurmft report {shlex.quote(str(into))}")
    return Exit.OK
