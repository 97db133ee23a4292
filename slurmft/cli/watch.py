"""Shows a live view of a run. It has progress, speed, loss, time left, the memory of the ranks, and
the slowest of them. Ctrl-C quits; the job keeps running. Otherwise it ends with the job, with its
exit code. Without a terminal it prints what `slurmft follow` prints. NO_COLOR=1 switches colours
off.

examples:
  slurmft watch last
  slurmft watch 4711 > progress.txt
"""

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.live import Live

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.follow import detached, follow, show_outcome
from slurmft.cli.parser import Parser
from slurmft.cluster.wait import JobWatch
from slurmft.core.run_records import Epoch, Ranks, Record, Resume, Start, Warned
from slurmft.core.terminal import raw
from slurmft.core.text import after_state
from slurmft.runs.records import RecordReader
from slurmft.show.watch_screen import RunView

ELSEWHERE = Elsewhere.PLAIN

_REDRAW_S = 1.0

_KINDS = (Start, Epoch, Resume, Warned, Ranks)
"""Records of the past that the screen begins with."""
_SAMPLES = 64
"""Places in the records of a long run that the curve of its loss is read from."""


def parser() -> Parser:
    return Parser("slurmft watch", __doc__).add_run()


def main(argv: list[str]) -> int:
    _, run = parser().parse_run(argv)
    console = Console(file=raw(sys.stdout))
    # A dumb terminal cannot move its cursor: each drawing would come below the last one.
    if not console.is_terminal or console.is_dumb_terminal:
        return follow(run)
    job = JobWatch(run)
    reader = RecordReader(run.records)
    view = RunView(run.path.name, footer="Ctrl-C quits; the job keeps running")
    records: Iterable[Record] = reader.read_recent(*_KINDS, samples=_SAMPLES)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as screen:
            for _ in job.looks(pause_s=_REDRAW_S):
                _update(view, job, records)
                screen.update(view, refresh=True)
                # All kinds now: of what is new, nothing is too much.
                records = reader.read(Record)
    except KeyboardInterrupt as interrupt:
        return detached(job, interrupt)
    # The screen of its own is gone: the last view stays where the command was typed.
    view.footer = ""
    console.print(view)
    return show_outcome(job)


def _update(view: "RunView", job: JobWatch, records: Iterable[Record]) -> None:
    """Shows what is new of a run and its job."""
    for record in records:
        # Each attempt may have other nodes.
        if isinstance(record, Start):
            environment = job.run.read_environment()
            view.hosts = [rank.host for rank in environment.ranks]
        view.take(record)
    report = job.state.report
    recorded = job.run.get_state()
    view.state = f"job {job.job_id} {report.name.lower()}"
    reason = after_state(report.reason, report.name.lower())
    if reason:
        view.state += f" ({reason})"
    elif recorded.reason and not report.ended:
        view.state += f": {recorded.reason}"
