"""Runs that came from elsewhere: the mark, what they would execute, and the yes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmft.cli import resume
from slurmft.core.errors import UsageError
from slurmft.core.files import write_json
from slurmft.core.program import OWN, PREDICT, RANK_MODULES
from slurmft.core.run_files import Job
from slurmft.programs.description import MODULE, OwnProgram
from slurmft.runs import origin
from slurmft.runs.origin import ForeignRunError, Origin
from slurmft.runs.rundir import RunDir
from slurmft.train import own_task
from slurmft.train.commands import predict
from slurmft.train.config import TrainConfig
from slurmft.train.login import predict as login_predict
from tests.support.made_runs import write_run

LAB = Origin(cluster="lab", path="/runs/r", owner="eve", user="ada", time=1e9)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = write_run(tmp_path / "r", state="failed", setup=("module load a", "touch b"))
    config = made.load_config()
    job = config.job.replaced({"notify_command": "mail me", "notify": ("json://eve",)})
    made.config.write_text(replace(config, job=job).to_json())
    origin.mark(made.path, LAB)
    return made


def test_nothing_acts_on_a_run_from_elsewhere(run: RunDir) -> None:
    assert not run.is_own()
    with pytest.raises(ForeignRunError, match=r"came from elsewhere \(lab:/runs/r"):
        run.load_own_config()
    assert run.load_config().job.setup  # it is shown all the same
    (run.path / origin.NAME).write_text("{")  # damaged, it is a mark, too
    assert not run.is_own()


def test_a_run_within_one_from_elsewhere_came_with_it(run: RunDir) -> None:
    inner = write_run(run.path / "code" / "inner")
    assert not inner.is_own()
    beside = write_run(run.path.parent / "beside")
    assert beside.is_own()


def test_the_mark_holds_for_all_below_whatever_is_there(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = write_run(run.path / "again", state="failed")
    run.config.unlink()
    assert not inner.is_own()
    # A mark that came along counts for nothing.
    origin.mark(inner.path, replace(LAB, accepted=["program"]))
    assert not inner.is_own()
    for yes in ("program", "program,setup"):
        with pytest.raises(ForeignRunError, match=r"came with .* from elsewhere"):
            resume.main([str(inner.path), "--cluster", "local", "--yes", yes])
    # A file of that name that is of another program marks nothing.
    (run.path / origin.NAME).write_text('{"url": "x"}')
    (inner.path / origin.NAME).unlink()
    assert inner.is_own()


def test_the_yes_names_what_is_executed(run: RunDir) -> None:
    lines = origin.executed(run.load_config())
    assert lines["setup"] == ["--setup 'module load a'", "--setup 'touch b'"]
    assert lines["notify-command"] == ["--notify-command 'mail me'"]
    assert lines["notify"] == ["--notify 'json://eve'"]
    assert lines["program"] == ["python -m slurmft.train.rank"]
    for names in ([], ["program"], [*lines, "env"]):
        with pytest.raises(UsageError, match="but the run executes"):
            origin.accept(run.path, lines, names)
    assert not run.is_own()
    origin.accept(run.path, lines, [*lines])
    assert run.is_own()
    assert origin.origin_of(run.path) == replace(LAB, accepted=sorted(lines))
    origin.mark(run.path, LAB)  # fetched again, it may have other files
    assert not run.is_own()


def test_only_what_the_ranks_execute_is_listed(run: RunDir) -> None:
    config = run.load_config()
    decoys = {"argv": ["true"], "code": "/harmless"}
    train = replace(
        config.program, settings=config.program.settings | decoys, code="/code"
    )
    lines = origin.executed(replace(config, program=train))["program"]
    assert lines == ["python -m slurmft.train.rank", "with the code in '/code'"]
    argv = ("python", "a\n  setup: b.py")
    settings = OwnProgram(argv=argv, file="a", folder="/f", code="/c")
    program = settings.program("own", code="/unused")
    lines = origin.executed(replace(config, program=program))["program"]
    assert lines == [repr(argv), "in the folder '/f'", "with the code in '/c'"]


def test_other_modules_are_refused(run: RunDir) -> None:
    assert RANK_MODULES[OWN] == MODULE
    config = run.load_config()
    assert TrainConfig.of(config.program).program().module == RANK_MODULES["train"]
    for kind, module in (("train", "evil"), (OWN, "slurmft.train.rank"), ("x", "x")):
        program = replace(config.program, kind=kind, module=module)
        with pytest.raises(ForeignRunError, match="executes the module"):
            origin.executed(replace(config, program=program))


def test_a_dry_run_records_no_consent(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    no_process = "4194305"
    write_json(run.job, Job(cluster="local", id=no_process))
    names = ",".join(origin.executed(run.load_config()))
    flags = ["--cluster", "local", "--nodes", "1", "--dry-run", "--yes", names]
    assert resume.main([str(run.path), *flags]) == 0
    assert "dry run: nothing was submitted" in capsys.readouterr().out
    assert not run.is_own()


def test_a_resume_that_fails_takes_the_yes_back(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ",".join(origin.executed(run.load_config()))

    def fail(run: RunDir, *_: object) -> str:
        assert run.is_own()
        raise UsageError("no cluster")

    monkeypatch.setattr(resume, "provenance", lambda *_: None)
    monkeypatch.setattr(resume, "resume", fail)
    with pytest.raises(UsageError, match="no cluster"):
        resume.main([str(run.path), "--yes", names])
    assert not run.is_own()
    monkeypatch.setattr(resume, "resume", lambda *_: "7")
    assert resume.main([str(run.path), "--yes", names]) == 0
    assert run.is_own()


def test_a_dry_run_of_predict_records_no_consent(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of its task is the first that `configure` executes."""
    config = run.load_config()
    program = replace(config.program, code=str(run.code))
    run.config.write_text(replace(config, program=program).to_json())
    prediction = write_run(tmp_path / "p", state="finished")
    config = prediction.load_config()
    settings = config.program.settings | {"model": str(run.model)}
    program = replace(config.program, kind=PREDICT, settings=settings)
    prediction.config.write_text(replace(config, program=program).to_json())

    def use_code(folder: str) -> None:
        assert folder == str(run.code)
        raise UsageError("it would be executed")

    run.set_state("submitted")
    run.set_state("finished")
    (run.model / "model.safetensors").parent.mkdir()
    (run.model / "model.safetensors").touch()
    monkeypatch.setattr(own_task, "use_code", use_code)
    names = ",".join(origin.executed(run.load_config()))
    rows = tmp_path / "rows.csv"
    rows.write_text("text\na\n")
    # The model may be named by a run of its own, or by a prediction with it.
    for name in (run.path, prediction.path):
        command = [str(name), str(rows), "--dry-run", "--yes"]
        with pytest.raises(UsageError, match="but the run executes"):
            predict.main([*command, "program"])
        with pytest.raises(UsageError, match="it would be executed"):
            predict.main([*command, names])
        assert not run.is_own()


def test_a_prediction_keeps_the_yes_once_it_is_submitted(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("text\na\n")
    names = ",".join(origin.executed(run.load_config()))
    monkeypatch.setattr(login_predict, "executes_code", lambda run: True)
    monkeypatch.setattr(login_predict, "trained_run", lambda run: run)
    monkeypatch.setattr(login_predict, "configure", lambda *_, **__: None)

    def refuse(*_: object) -> int:
        assert run.is_own()
        raise UsageError("no cluster")

    monkeypatch.setattr(predict, "submit_or_show", refuse)
    with pytest.raises(UsageError, match="no cluster"):
        predict.main([str(run.path), str(rows), "--yes", names])
    assert not run.is_own()

    def follow(*arguments: Any) -> int:
        submitted = arguments[-1]
        submitted()
        raise KeyboardInterrupt

    monkeypatch.setattr(predict, "submit_or_show", follow)
    with pytest.raises(KeyboardInterrupt):
        predict.main([str(run.path), str(rows), "--yes", names])
    assert run.is_own()
