"""Reports: levels, lines, and what they do not show."""

from __future__ import annotations

import json

import pytest

from slurmft.core import credentials
from slurmft.plugins.examine import checks
from slurmft.plugins.examine.checks import Report, failure, ok, warning


def test_only_failures_fail() -> None:
    good, doubtful, bad = ok("a", "x"), warning("b", "y", "do this"), failure("c", "z")
    assert Report(checks=[good, doubtful]).exit_code == 0
    assert Report(checks=[good, doubtful, bad]).exit_code == 1
    assert checks.lines([good, doubtful]) == ["ok       a  x", "WARNING  b  y",
                                              "            -> do this"]  # fmt: skip
    last = Report(checks=[good, bad], seconds=1.23).text().splitlines()[-1]
    assert last == "1 ok, 0 warning(s), 1 failure(s); took 1.2 s"


def test_secrets_do_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = 'se"cret-99'
    environment = {
        "HF_TOKEN": secret,
        "SLURM_JWT": "abc.def",
        "AWS_SECRET_ACCESS_KEY": "else-where",
        "HF_ENDPOINT": "https://me:pass@mirror.example.com/hf",
        "OMP_NUM_THREADS": "4",
        "EDITOR": "vi",
    }
    reported = checks.reported_environment(environment)
    assert reported["HF_TOKEN"] == reported["SLURM_JWT"] == "[hidden]"
    assert reported["OMP_NUM_THREADS"] == "4"
    assert not {"EDITOR", "AWS_SECRET_ACCESS_KEY"} & reported.keys()
    text = json.dumps([reported, secret, "hf_ABCDEFGHIJKLMNOP", "else-where"]) + secret
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    clean = credentials.redact(text)
    for part in ("cret-99", "pass", "me:", "ABCDEFG", "else-where"):
        assert part not in clean
    assert "https://[hidden]@mirror.example.com/hf" in clean
    json.loads(clean.removesuffix(credentials.HIDDEN))
