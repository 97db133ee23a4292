"""filelock's own tests pass under the shim, in its oldest and its newest release.

The tests of an exception look at the call that the shim replaces, or at what a primitive cannot do.
One that passes fails its list: it no longer is an exception.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree
from pathlib import Path

import pytest

from slurmft import locks

pytestmark = pytest.mark.extra("versions")

OLDEST = "3.4.0"
NEWEST = "4.3.1"

NATIVE = re.compile(r"\b(Async)?(Unix)?FileLock\b|\block_descriptor\b")
"""In a file of tests that take the locks which the shim replaces."""

OTHERS = "not SoftFileLock and not SoftFileLease and not test_ro_"
"""Left out: cases of locks that the shim does not touch, and files that root may write all the
same."""

ASIDE = {
    "test_permission_error_fallback_without_o_creat": (
        "counts calls of os.open; the shim opens the folder, so that NFS shows its files"
    ),
    "test_import_without_fcntl_uses_soft_aliases_and_descriptor_errors": (
        "a Python without fcntl, whose sitecustomize cannot load the shim"
    ),
}
REPLACED = {
    "test_acquire_from_a_signal_handler_during_a_release_is_refused": (
        "interrupts fcntl.flock"
    ),
    "test_errno_after_unix_unlock_refuses_reentrant_acquire": "hooks fcntl.flock",
    "test_errno_before_unix_unlock_keeps_explicit_retry": "hooks fcntl.flock",
    "test_flock_not_implemented_unix": "makes fcntl.flock fail",
    "test_native_descriptor_is_visible_during_flock_audit": "audits fcntl.flock",
    "test_release_reentered_after_unlock_closes_descriptor_once": "hooks fcntl.flock",
    "test_runner_shutdown_chains_body_cancellation_and_release_errors": (
        "makes fcntl.flock fail"
    ),
    "test_runner_shutdown_groups_body_cancellation_and_release_errors": (
        "makes fcntl.flock fail"
    ),
    "test_waiter_fd_cannot_split_lock_after_release": (
        "locks by flock itself, which does not see the other primitives"
    ),
}
ENDLESS = {
    "lockf": {
        "test_concurrent_fallback_keeps_both_acquires_valid": (
            "waits within fcntl.flock, where another thread must not open the file: who is first "
            "after five seconds decides"
        ),
        "test_errno_after_async_unix_unlock_refuses_reentrant_acquire": (
            "unlocks by flock, and waits for lockf's lock, which stays"
        ),
    },
    "soft": {
        "test_errno_after_async_unix_unlock_refuses_reentrant_acquire": (
            "unlocks by flock, and waits for the second file, which stays"
        ),
    },
}
"""Primitive -> exceptions that wait until a limit ends them: they are not run."""

IN_A_FILE = {
    "test_acquire_proceeds_after_queued_release_is_canceled": (
        "unlocks by flock: closing the descriptor leaves the file"
    ),
    "test_acquire_repeated_cancellation_waits_for_rollback": (
        "unlocks by flock: closing the descriptor leaves the file"
    ),
    "test_callback_lock_retries_after_the_link_count_returns_to_one": (
        "two names of one file have two .soft files"
    ),
    "test_failed_acquire_retains_registration_after_failed_unlock": (
        "makes fcntl.flock fail"
    ),
    "test_hard_linked_names_share_a_native_lock_without_a_callback": (
        "two names of one file have two .soft files"
    ),
    "test_nested_acquire_without_working_directory_preserves_hold[UnixFileLock]": (
        "removes the folder, which has the .soft file"
    ),
    "test_post_open_failure_closes_fd[fchmod]": (
        "makes os.fchmod fail, which the second file needs as well"
    ),
    "test_release_completes_despite_cancellation": (
        "unlocks by flock: closing the descriptor leaves the file"
    ),
    "test_simple": "compares the log, which has the lines of the second file as well",
    "test_stale_inode_retry_on_unlinked_lock": (
        "counts calls of os.fstat, which the second file needs as well"
    ),
    "test_unrelated_acquisitions_reach_filesystem_boundary_concurrently": (
        "waits once in os.fstat, which the second file needs as well"
    ),
}
EXCEPTIONS: dict[tuple[str, str], dict[str, str]] = {
    (OLDEST, "soft"): {"test_simple": IN_A_FILE["test_simple"]},
    (NEWEST, "auto"): ASIDE,
    (NEWEST, "lockf"): ASIDE | REPLACED,
    (NEWEST, "ofd"): ASIDE | REPLACED,
    (NEWEST, "soft"): ASIDE | REPLACED | IN_A_FILE,
}
"""Release and primitive -> name of a test, with or without its parameters -> the reason."""

TIMEOUT_S = 1500

# pip asks the build system of a source what it is called, and those of some releases need packages
# that not every index has: this one answers without them.
BUILD_SYSTEM = """
import os

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    with open("PKG-INFO") as file:
        text = file.read()
    os.mkdir(os.path.join(folder, "filelock.dist-info"))
    with open(os.path.join(folder, "filelock.dist-info", "METADATA"), "w") as file:
        file.write(text)
    return "filelock.dist-info"
"""


def pip(*arguments: str, **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | variables,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"cannot {arguments[0]}: {done.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What filelock's tests need beside pytest."""
    folder = tmp_path_factory.mktemp("plugins")
    packages = ("pytest-asyncio", "pytest-mock")
    pip("install", "-q", "--no-deps", "--target", str(folder), *packages)
    return folder


def unpack(version: str, folder: Path) -> Path:
    """Returns a release's sources, with its tests."""
    build_systems = folder / "build"
    for name in ("hatchling/build.py", "setuptools/build_meta.py"):
        file = build_systems / name
        file.parent.mkdir(parents=True)
        file.with_name("__init__.py").touch()
        file.write_text(BUILD_SYSTEM)
    pip(
        "download",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary=filelock",
        "--dest",
        str(folder),
        f"filelock=={version}",
        PYTHONPATH=str(build_systems),
    )
    with tarfile.open(next(folder.glob("filelock-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    sources = folder / f"filelock-{version}"
    # Else `tests` is the package of this checkout, where that is importable.
    (sources / "tests" / "__init__.py").touch()
    return sources


def failures(sources: Path, plugins: Path, primitive: str) -> tuple[set[str], set[str]]:
    """Returns the names of the tests that fail under the shim, and of those that pass."""
    files = [
        str(file)
        for file in sorted(sources.joinpath("tests").rglob("test_*.py"))
        if NATIVE.search(file.read_text())
    ]
    report = sources / "report.xml"
    python_path = {"PYTHONPATH": f"{sources / 'src'}{os.pathsep}{plugins}"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
    ]
    # Their own limit of 20 s is short on a busy machine.
    selected = " and not ".join([OTHERS, *ENDLESS.get(primitive, ())])
    command += ["--timeout", "120", "-k", selected, "--junitxml", str(report)]
    done = subprocess.run(
        [*command, *files],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=sources,
        env=os.environ | python_path | locks.environment(primitive, python_path),
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr
    failed: set[str] = set()
    passed: set[str] = set()
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        name = case.attrib["name"]
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(name)
        elif case.find("skipped") is None:
            passed.add(name)
    return failed, passed - failed


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("primitive", ["auto", "lockf", "ofd", "soft"])
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_filelocks_own_tests(
    version: str, primitive: str, plugins: Path, tmp_path: Path
) -> None:
    exceptions = EXCEPTIONS.get((version, primitive), {})
    failed, passed = failures(unpack(version, tmp_path), plugins, primitive)
    assert len(passed) > 10, "the suite has not run"

    def is_exception(test: str) -> bool:
        return test in exceptions or test.partition("[")[0] in exceptions

    new = {test for test in failed if not is_exception(test)}
    failed_names = failed | {test.partition("[")[0] for test in failed}
    assert (new, set(exceptions) - failed_names) == (set(), set())
