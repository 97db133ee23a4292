"""The question before something of a run from elsewhere is executed."""

import contextlib
import sys
from collections.abc import Iterator

from slurmft.cli.parser import Parser, confirmed
from slurmft.core.errors import UsageError
from slurmft.runs import origin
from slurmft.runs.rundir import RunDir


def add_yes(parser: Parser) -> None:
    """Adds --yes, by which a script agrees to what a run from elsewhere executes."""
    text = "of a run that was fetched by slurmft pull: what it may execute, by the names shown"
    parser.add_argument("--yes", metavar="NAME,...", help=text)


@contextlib.contextmanager
def agreed(run: RunDir, yes: str | None, records: bool = True) -> Iterator[None]:
    """Asks as `ask` does before the block. An error in it takes the answer back: nothing was
    executed, and the run may be another one by the next time."""
    is_new = ask(run, yes, records)
    try:
        yield
    except BaseException:
        if is_new and records:
            origin.withdraw(run.path)
        raise


def ask(run: RunDir, yes: str | None, records: bool = True) -> bool:
    """Shows what a run from elsewhere would execute, and asks whether it may; returns False for a
    run that was submitted here, or was agreed to before.

    Args:
        records: False: the answer holds for this command alone, which is a dry run.

    Raises:
        UsageError: it may not, or nobody is there to ask.
        ForeignRunError: it names a module that is of none of slurmft's programs; or it lies within
            a run from elsewhere.
    """
    came_from = origin.origin_of(run.path)
    if came_from is None or came_from.accepted:
        return False
    origin.check_alone(run.path)
    lines = origin.executed(run.load_config())
    text = [f"{run.path} came from elsewhere: {came_from}", "It would execute as you:"]
    for name, parts in lines.items():
        for part in parts:
            text.append(f"  {name}: {part}")
    print("\n".join(text), file=sys.stderr, flush=True)
    names = ",".join(lines)
    if yes is not None:
        accepted = [name for name in yes.split(",") if name]
        origin.accept(run.path, lines, accepted, records)
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            f"{str(run.path)!r} came from elsewhere, and there is no terminal to ask whether it "
            f"may execute the above",
            f"if it may: --yes {names}",
        )
    if not confirmed("execute that?"):
        raise UsageError(
            "nothing was executed", "slurmft report and status show the run"
        )
    origin.accept(run.path, lines, lines, records)
    return True
