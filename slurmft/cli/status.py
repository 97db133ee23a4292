"""Shows one run in full, and what to type next. It shows the state and the reason for it, settings,
hosts, progress, speed, metrics, checkpoints, history, warnings and failures.

examples:
  slurmft status                           the newest of your runs
  slurmft status emotion-20261120          first letters of its name, where only one begins so
  slurmft status 8123 --json               by its job's id, for programs
"""

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.hints import next_commands
from slurmft.cli.parser import Parser, print_json
from slurmft.cluster.fact_types import RunFacts
from slurmft.cluster.facts import run_facts
from slurmft.core.errors import Exit
from slurmft.runs import resolve
from slurmft.show import run_page, status_words

ELSEWHERE = Elsewhere.PLAIN


def parser() -> Parser:
    command = Parser("slurmft status", __doc__).add_run(default=resolve.LAST)
    return command.add_json("all that is known, as JSON", RunFacts)


def main(argv: list[str]) -> int:
    arguments, run = parser().parse_run(argv)
    facts = run_facts(run)
    if arguments.json:
        return print_json(facts)
    print(run_page.text(facts))
    # By its state: nobody cancels a run that has finished.
    sensible = status_words.next_commands(facts["state"], facts["program"]["kind"])
    if sensible:
        print(next_commands(run.path, sensible))
    return Exit.OK
