"""slurmft installed from a wheel, where no checkout is; built from a tag, without network."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from argparse import Namespace
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from slurmft import __version__
from slurmft.core import shipped
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import UsageError
from slurmft.plugins.kubernetes import manifests
from slurmft.plugins.studies import published, spec
from slurmft.train.config import TrainConfig
from tests.conftest import Done
from tests.support import CHECKOUT, PATIENCE_S

pytestmark = pytest.mark.extra("wheel")

VERSION = "1.2.3"
OF_GIT = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
EXAMPLES = {
    f"shipped/{kind}/{f.name}" for kind in shipped.KINDS for f in shipped.files(kind)
}
SHIPPED = EXAMPLES | {f"shipped/docs/{page.name}" for page in shipped.pages()}
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]


def call(*words: str | Path, cwd: Path, **variables: str) -> Done:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    done = subprocess.run(
        words,
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def git(folder: Path, *words: str) -> str:
    author = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    done = call("git", *author, *words, cwd=folder, **OF_GIT)
    assert done.code == 0, done.err
    return done.out


def build(source: Path, output: Path, *flags: str, **variables: str) -> list[Path]:
    """What uv builds without network: the sdist, and from it the wheel."""
    command = ["uv", "build", "--no-build-isolation", "--offline", "--no-cache", *flags]
    command += ["--python", sys.executable, "--out-dir", str(output), str(source)]
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = call(str(uv), *command[1:], cwd=source, **variables)
    assert done.code == 0, done.err
    return sorted(output.glob("slurmft-*"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of this checkout, without git's folder."""
    folder = tmp_path_factory.mktemp("source") / "slurmft"
    names = git(CHECKOUT, "ls-files", "--cached", "--others", "--exclude-standard")
    for name in names.splitlines():
        if (CHECKOUT / name).exists():  # else it is deleted, and not yet committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def tagged(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of these files, with a tag."""
    tagged = tmp_path_factory.mktemp("tagged") / "slurmft"
    shutil.copytree(source, tagged, symlinks=True)
    git(tagged, "init", "--quiet")
    git(tagged, "add", "--all")
    git(tagged, "commit", "--quiet", "--message", "All")
    git(tagged, "tag", "--annotate", f"v{VERSION}", "--message", "A release")
    return tagged


@pytest.fixture(scope="module")
def built(tagged: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist of the tag."""
    wheel, sdist = build(tagged, tmp_path_factory.mktemp("built"), **OF_GIT)
    return wheel, sdist


@pytest.fixture(scope="module")
def python(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with the wheel; what it needs is in the tests' own."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # a wheel of pure Python is installed by unpacking it
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(packages)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin/python"


def slurmft(python: Path, *words: str, cwd: Path) -> Done:
    return call(python, "-m", "slurmft", *words, cwd=cwd, HF_HUB_OFFLINE="1")


# --- what is built --------------------------------------------------------------------------------


def test_wheel_has_what_the_package_reads(built: tuple[Path, Path]) -> None:
    """Every file that git has below slurmft/ is there, and none beside."""
    with zipfile.ZipFile(built[0]) as wheel:
        inside = {n for n in wheel.namelist() if ".dist-info/" not in n}
    tracked = set(
        git(CHECKOUT, "ls-files", "-co", "--exclude-standard", "slurmft").split()
    )
    links = {
        n for n in tracked if (CHECKOUT / n).is_dir() or not (CHECKOUT / n).exists()
    }
    expected = (tracked - links) | {f"slurmft/{name}" for name in SHIPPED}
    assert inside == expected | {"slurmft/_version.py"}


def test_sdist_has_the_tests_and_the_documentation(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    for name in (
        "tests/conftest.py",
        "docs/sites.md",
        "CITATION.cff",
        "LICENSE",
        ".ci/run",
    ):
        assert name in inside
    assert {f"slurmft/{name}" for name in SHIPPED} <= inside


def test_metadata(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        text = wheel.read(name)
    found = Metadata.from_email(text, validate=True)
    assert (found.name, str(found.version)) == ("slurmft", VERSION)
    assert found.license_expression == "Apache-2.0"
    assert found.description_content_type == "text/markdown"
    assert message_from_bytes(text).get_payload().startswith("# slurmft")  # type: ignore[union-attr]
    assert set(found.provides_extra or ()) == PROJECT["optional-dependencies"].keys()


def test_version_of_an_archive(tagged: Path, tmp_path: Path) -> None:
    """What hosts of repositories offer as the source of a tag, without git's folder."""
    git(
        tagged,
        "archive",
        "--prefix",
        "there/",
        "--output",
        str(tmp_path / "a.tar"),
        "HEAD",
    )
    with tarfile.open(tmp_path / "a.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    (wheel,) = build(tmp_path / "there", tmp_path / "built", "--wheel")
    assert wheel.name == f"slurmft-{VERSION}-py3-none-any.whl"


def test_version_without_git(source: Path, tmp_path: Path) -> None:
    """A tarball, and a shallow clone where there is no program git, can be built, too."""
    clone = tmp_path / "clone"
    shutil.copytree(source, clone, symlinks=True)
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{CHECKOUT}", "there")
    (tmp_path / "there/.git").rename(clone / ".git")
    here = tmp_path / "here"
    here.mkdir()
    for folder, path in ((source, os.environ["PATH"]), (clone, str(here))):
        (wheel,) = build(folder, tmp_path / folder.name, "--wheel", PATH=path)
        assert wheel.name == "slurmft-0.1.dev0-py3-none-any.whl"


# --- what is installed ----------------------------------------------------------------------------


def test_version(python: Path, tmp_path: Path) -> None:
    done = slurmft(python, "--version", cwd=tmp_path)
    assert done.out == f"slurmft {VERSION}\n"


def test_a_run_and_its_report(
    python: Path, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    flags = [
        "--cluster",
        "local",
        "--task",
        "emotion",
        "--data",
        str(tiny_data),
        "--nodes",
        "1",
    ]
    flags += ["--model", str(tiny_model), "--max-steps", "2", "--precision", "fp32"]
    done = slurmft(python, "submit", *flags, "--follow", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.run.path.parent == tmp_path / "runs"
    assert done.run.load_config().submission.slurmft == VERSION
    done = slurmft(
        python,
        "report",
        "runs",
        "--published",
        "mn4_emotion",
        "--output",
        "r",
        cwd=tmp_path,
    )
    assert done.code == 0, done.err
    assert "DistilBERT" in (tmp_path / "r/report.html").read_text()


def test_a_study_that_comes_along(python: Path, tmp_path: Path) -> None:
    words = ("study", "run", "lab-train", "--cluster", "local", "--dry-run")
    done = slurmft(python, *words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "nothing was submitted" in done.out
    done = slurmft(
        python, "report", "mn4_benchmark", "--format", "markdown", cwd=tmp_path
    )
    assert done.code == 0, done.err
    assert "| GPUs |" in done.out


def test_image(python: Path, tmp_path: Path) -> None:
    """What the Dockerfile copies and installs makes a working slurmft."""
    flags = (
        "--image",
        "registry.example.com/slurmft:1",
        "--claim",
        "runs",
        "--output",
        "deploy",
    )
    done = slurmft(python, "render", "kubernetes", *flags, cwd=tmp_path)
    assert done.code == 0, done.err
    line = next(x for x in done.out.splitlines() if x.startswith("docker build"))
    shutil.copytree(shlex.split(line)[-1], tmp_path / "opt/slurmft")
    text = (tmp_path / "deploy/Dockerfile").read_text().replace("\\\n", "")
    assert "WORKDIR /opt/slurmft\nCOPY . slurmft\n" in text
    words = shlex.split(
        next(x for x in text.splitlines() if x.startswith("RUN pip install"))
    )
    assert set(PROJECT["dependencies"]) <= set(words)
    assert (tmp_path / "opt" / words[words.index("-c") + 1]).is_file()
    done = call(
        sys.executable,
        "-m",
        "slurmft",
        "--version",
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path / "opt"),
    )
    assert done.out == f"slurmft {VERSION}\n"


def test_image_of_a_checkout(source: Path, tmp_path: Path) -> None:
    """What the Dockerfile copies of a checkout is enough to build it, without git."""
    config = RunConfig(program=TrainConfig.resolve().program(), job=JobConfig())
    text = manifests.dockerfile(config, Namespace(gpus=0))
    copied = [
        n for names in re.findall(r"^COPY (.*) \S+$", text, re.M) for n in names.split()
    ]
    (tmp_path / "image").mkdir()
    cp = ["cp", "--archive", "--parents", *copied, str(tmp_path / "image")]
    subprocess.run(cp, cwd=source, check=True, timeout=30)
    assert f"RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_SLURMFT={__version__} " in text
    made = {"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_SLURMFT": "4.5.6"}
    (wheel,) = build(tmp_path / "image", tmp_path / "built", "--wheel", **made)
    assert wheel.name == "slurmft-4.5.6-py3-none-any.whl"
    assert {f"slurmft/{name}" for name in SHIPPED} <= set(
        zipfile.ZipFile(wheel).namelist()
    )


def test_examples(python: Path, tmp_path: Path) -> None:
    done = slurmft(python, "examples", cwd=tmp_path)
    assert done.code == 0, done.err
    for name in EXAMPLES:
        assert Path(name).stem in done.out
    assert max(map(len, done.out.splitlines())) <= 60
    (tmp_path / "mine/sbatch").mkdir(parents=True)
    (tmp_path / "mine/sbatch/multi_node.sbatch").write_text("changed")
    done = slurmft(python, "examples", "mine", cwd=tmp_path)
    assert done.out == f"{len(EXAMPLES) - 1} files written to mine\n"
    assert (tmp_path / "mine/sbatch/multi_node.sbatch").read_text() == "changed"
    study = spec.read_study(tmp_path / "mine/studies/lab-train.toml")
    assert study.published is not None
    assert published.load(study.published)


# --- names ----------------------------------------------------------------------------------------


def test_a_file_of_ones_own_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        shipped.find("studies", "lab-train")
        == shipped.FOLDER / "studies/lab-train.toml"
    )
    assert (
        shipped.find("studies", "lab-train.toml")
        == shipped.FOLDER / "studies/lab-train.toml"
    )
    assert shipped.find("published", "last") == Path("last")
    (tmp_path / "lab-train").write_text("")
    assert shipped.find("studies", "lab-train") == Path("lab-train")


def test_examples_where_nobody_may_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write to") as error:
        shipped.copy(tmp_path / "file")
    assert error.value.hint
