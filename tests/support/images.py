"""Images for Charliecloud and Podman without a registry: folders that show this machine's own /usr,
Python and its packages."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_EMPTY = (
    "usr",
    "etc",
    "dev",
    "proc",
    "sys",
    "run",
    "tmp",
    "var/tmp",
    "root",
    "home",
    "opt",
)
_SHOWN = tuple(p for p in dict.fromkeys(("/usr", sys.base_prefix, sys.prefix))
               if p == "/usr" or not p.startswith("/usr/"))  # fmt: skip


def make(folder: Path) -> Path:
    """An image without programs."""
    for name in _EMPTY:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            (folder / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (folder / "etc" / name).touch()
    return folder


@contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """The same, with this machine's programs mounted in it: for Charliecloud."""
    made = []
    try:
        for path in _SHOWN:
            place = folder / path.lstrip("/")
            place.mkdir(parents=True, exist_ok=True)
            subprocess.run(
                ["mount", "--bind", path, str(place)], check=True, timeout=30
            )
            made.append(place)
        yield folder
    finally:
        for place in reversed(made):
            subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=30)


def podman_environment(folder: Path) -> dict[str, str]:
    """An environment in which Podman mounts this machine's programs into every container.

    Besides: crun refuses a machine with both versions of cgroups, which here and there is one; and
    root may not be allowed to raise its limits to those that Podman would set.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files, processes = (min(resource.getrlimit(kind)[0], 30000) for kind in
                        (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))  # fmt: skip
    limits = [f"nofile={files}:{files}", f"nproc={processes}:{processes}"]
    volumes = [f"{path}:{path}:ro" for path in _SHOWN]
    conf = folder / "containers.conf"
    conf.write_text(
        f"[containers]\ndefault_ulimits = {json.dumps(limits)}\nvolumes = {json.dumps(volumes)}\n"
    )
    tool = folder / "podman"
    both = (
        'exec unshare --mount bash -c \'umount /sys/fs/cgroup/unified; exec "$0" "$@"\''
    )
    before = both if os.path.ismount("/sys/fs/cgroup/unified") else "exec"
    tool.write_text(f'#!/bin/bash\n{before} {shutil.which("podman")} "$@"\n')
    tool.chmod(0o755)
    return {"CONTAINERS_CONF": str(conf)}


def missing(runtime: str, folder: Path) -> str:
    """Why Charliecloud or Podman cannot run here; "": it can."""
    program = {"charliecloud": "ch-run", "podman": "podman"}[runtime]
    if shutil.which(program) is None:
        return f"needs Debian's {'charliecloud-runtime' if program == 'ch-run' else 'podman crun'}"
    if os.geteuid() != 0:
        return "needs root, to mount /usr into an image"
    image = make(folder / "image")
    if runtime == "charliecloud":
        with mounted(image):
            return _failure(["ch-run", str(image), "--", "true"], {"USER": "root"})
    env = podman_environment(folder)
    command = [
        str(folder / "podman"),
        "run",
        "--rm",
        "--cgroups=disabled",
        "--network=host",
    ]
    return _failure([*command, "--rootfs", f"{image}:O", "true"], env)


def _failure(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return (
        f"{command[0]} cannot run here: {done.stderr.strip()}"
        if done.returncode
        else ""
    )
