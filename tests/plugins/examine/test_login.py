"""Checks of the login node; Slurm's output is as 22.05.8 prints it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurmft.cluster.slurm import commands as slurm_commands
from slurmft.plugins.examine import login
from slurmft.plugins.examine.checks import Level


def test_settings() -> None:
    text = (
        "Configuration data as of 2026-11-22T00:31:06\n"
        "AccountingStorageBackupHost = (null)\n"
        "AccountingStorageEnforce = none\n"
        "KillWait                = 10 sec\n"
        "SchedulerParameters     = batch_sched_delay=0,sched_interval=2\n"
        "\nSlurmctld(primary) at login is UP\n"
    )
    assert slurm_commands.parse_settings(text) == {
        "AccountingStorageEnforce": "none",
        "KillWait": "10 sec",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=2",
    }


def test_folders_of_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    folders = [tmp_path / "own", tmp_path / "of a group"]
    for folder in folders:
        folder.mkdir(mode=0o755)
    monkeypatch.setattr(sys, "path", [*map(str, folders), "/absent.zip"])
    (check,) = login.imports()
    assert check.level == Level.OK
    assert "the 2 folders" in check.text
    folders[1].chmod(0o2775)
    (check,) = login.imports()
    assert check.level == Level.WARNING
    assert f"into '{folders[1]}'" in check.text
    assert (
        check.hint == f"if nobody else is to install there: chmod go-w '{folders[1]}'"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:")
    (check,) = login.imports()
    assert check.level == Level.WARNING
    assert "names the folder that a command runs in" in check.text
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}")
    assert "PYTHONPATH" not in login.imports()[0].text


def test_nodes_that_take_no_jobs() -> None:
    text = (
        "n1|idle|none\nn1|idle|none\nn2|drained|bad | disk, see log\n"
        "n3|down*|Not responding\nn4|allocated|none\nn5|idle*|none\n"
    )
    unwell = slurm_commands.parse_unwell_hosts(text)
    assert unwell == {
        "n2": "drained: bad | disk, see log",
        "n3": "down*: Not responding",
        "n5": "idle*",
    }
    check = login.check_down_nodes(unwell)
    assert check.level == Level.WARNING
    assert "n3 is down*: Not responding" in check.text
    assert login.check_down_nodes({}).level == Level.OK


def test_partitions_and_accounts() -> None:
    here = slurm_commands.parse_partitions(
        "batch|up|1:00:00|4|4\nold|down|1:00:00|64|4\n"
    )
    judge = login.check_partitions
    assert judge(here, None, 4).level == Level.OK
    assert judge(here, "gpu", 1).text.startswith(
        "there is no partition 'gpu'; there are: batch (4 nodes"
    )
    for partition in (None, "batch", "old"):
        assert judge(here, partition, 8).text.startswith("no 8 nodes in")
    assert judge([], None, 1).level == Level.FAILURE
    fields = "Account,Partition,QOS,MaxJobs,MaxSubmit,MaxTRES,MaxWall,GrpTRES"
    rows = slurm_commands.parse_associations("root||normal|||||\n", fields)
    assert rows == [{"Account": "root", "QOS": "normal"}]
    allowed = login.check_accounting
    assert allowed("me", rows, {}).level == Level.OK
    assert allowed("me", [], {"AccountingStorageEnforce": "none"}).level == Level.OK
    assert allowed(
        "me", [], {"AccountingStorageEnforce": "associations,limits"}
    ).level == (Level.FAILURE)
