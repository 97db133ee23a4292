"""What do the commands cost that read a run of a million steps?

    python results/benchmarks/long_runs.py     # 3 minutes

A made-up run directory of so many steps, and one of a thousand; interleaved rounds of the real
commands, each in a process of its own: wall and processor time, peak memory.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from harness import parser, save
from report_speed import measure, medians

STEPS = {"thousand": 1_000, "million": 1_000_000}
ROUNDS = 5


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        runs = {
            title: make_run(Path(name) / title, steps) for title, steps in STEPS.items()
        }
        found: dict[str, dict[str, list[dict[str, float]]]] = {}
        for _ in range(ROUNDS):
            for title, run in runs.items():
                for command, arguments in commands(run, Path(name) / "out").items():
                    rounds = found.setdefault(command, {}).setdefault(title, [])
                    rounds.append(measure([command, *arguments]))
        sizes = {title: size_mib(run) for title, run in runs.items()}
    values = {
        command: {title: medians(rounds) for title, rounds in by_run.items()}
        for command, by_run in found.items()
    }
    save("long_runs", {"steps": STEPS, "rounds": ROUNDS, "records_mib": sizes} | values)


def make_run(folder: Path, steps: int) -> Path:
    from slurmft.core.files import write_json
    from tests.support.made_runs import write_long_records, write_run

    run = write_run(folder / "emotion-20261120-093012-a1b2c3")
    evaluated_after = [steps // 10 * part for part in range(1, 10)]
    write_long_records(run.records, steps=steps, evaluated_after=evaluated_after)
    write_json(run.job, {"cluster": "local", "id": "999999"})
    return run.path


def commands(run: Path, output: Path) -> dict[str, list[str]]:
    """Command -> its arguments."""
    runs = str(run.parent)
    return {
        "status": [str(run)],
        "list": ["--runs-dir", runs],
        "follow": [str(run)],
        "watch": [str(run)],
        "report": [runs, "--output", str(output)],
    }


def size_mib(run: Path) -> float:
    return round((run / "records.jsonl").stat().st_size / 2**20, 1)


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
