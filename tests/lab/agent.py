"""What a client does for the checks: `python -m tests.lab.agent`, an agent on the client."""

from __future__ import annotations

import errno
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from slurmft.core import files
from slurmft.job import checkpoints
from slurmft.job.checkpoints import Checkpoints
from slurmft.plugins.examine import lock_operations
from slurmft.plugins.examine.agents import serve
from slurmft.runs.rundir import RunDir

POLL_S = 0.002
CHUNK = 2**20


def words(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, error.errno)}: {error.strerror or error}"


class Operations(lock_operations.LockOperations):
    """Each operation answers with JSON; the paths are the client's."""

    def hello(self) -> str:
        return os.uname().nodename

    # --- names and contents ---

    def exclusive(self, folder: str, count: int, start: float, kind: str) -> list[int]:
        """Which of so many names this client was the first to create, by a kind of call."""
        won = []
        time.sleep(max(0.0, start))
        for number in range(count):
            path = f"{folder}/{kind}-{number}"
            time.sleep(random.random() / 500)  # now one is ahead, now the other
            try:
                if kind == "O_EXCL":
                    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                elif kind == "mkdir":
                    os.mkdir(path)
                else:
                    os.symlink(kind, path)
                won.append(number)
            except FileExistsError:
                pass
        return won

    def replace(self, path: str, seconds: float) -> int:
        """Replaces a file again and again, as slurmft replaces its files; how often."""
        number, deadline = 0, time.monotonic() + seconds
        while True:
            number += 1
            files.write_json(Path(path), _content(number))
            if time.monotonic() > deadline:
                return number
            time.sleep(random.random() / 2)

    def read_all_along(
        self, path: str, seconds: float, patient: bool
    ) -> dict[str, Any]:
        """Reads a file that another client replaces; what was seen, the errors by their names.

        Args:
            patient: as slurmft reads its files; else as any program.
        """
        seen: dict[str, Any] = {
            "reads": 0,
            "torn": 0,
            "older": 0,
            "gap_s": 0.0,
            "errors": {},
        }
        last, since = 0, time.monotonic()
        deadline = since + seconds
        while time.monotonic() < deadline:
            try:
                found = (
                    files.read_json(Path(path)) if patient else json.loads(_read(path))
                )
                if found is None:
                    raise OSError(0, "None")
            except ValueError:
                seen["torn"] += 1
                continue
            except OSError as error:
                name = errno.errorcode.get(error.errno or 0, "None")
                seen["errors"][name] = seen["errors"].get(name, 0) + 1
                continue
            seen["reads"] += 1
            seen["torn"] += found != _content(found["number"])
            seen["older"] += found["number"] < last
            seen["gap_s"] = round(max(seen["gap_s"], time.monotonic() - since), 2)
            last, since = max(last, found["number"]), time.monotonic()
        return seen | {"last": last}

    def write_text(self, path: str, text: str) -> None:
        files.write_text(Path(path), text)

    def create(self, path: str) -> None:
        Path(path).touch()

    def make_folder(self, path: str, mode: int = 0o755) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        Path(path).chmod(mode)

    def append(self, path: str, text: str) -> None:
        """As a record is: one write, which stays open for the next."""
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(file, text.encode())
        os.close(file)

    def await_content(self, path: str, text: str, within_s: float) -> bool:
        """Whether a file comes to hold, or to end with, a text."""

        def there() -> bool:
            try:
                return Path(path).read_text().endswith(text)
            except OSError:
                return False

        return _wait(there, within_s)

    def await_file(self, path: str, within_s: float) -> bool:
        """Whether a file comes to be there, as slurmft looks for it."""
        return _wait(lambda: files.exists_now(Path(path)), within_s)

    def await_listed(self, path: str, within_s: float) -> bool:
        """Whether a name comes to be in the listing of its folder."""
        place = Path(path)
        return _wait(lambda: place.name in os.listdir(place.parent), within_s)

    def names(self, folder: str) -> list[str]:
        return sorted(os.listdir(folder))

    def remove_all(self, folder: str) -> None:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)

    # --- checkpoints ---

    def write_checkpoint(
        self, run: str, step: int, mib: int, pause_s: float = 0
    ) -> dict[str, Any]:
        """Writes a checkpoint of four files as slurmft does: seconds, and the error's words.

        Args:
            pause_s: after each MiB.
        """
        began = time.monotonic()
        error = None
        try:
            writer = Checkpoints(RunDir(Path(run)), every_s=0, keep=2)
            with writer.write(checkpoints.checkpoint_name(step)) as folder:
                for number in range(4):
                    with open(folder / f"part-{number}.bin", "wb", buffering=0) as file:
                        for _ in range(mib // 4):
                            file.write(os.urandom(CHUNK))
                            time.sleep(pause_s)
        except OSError as caught:
            error = words(caught)
        return {"seconds": time.monotonic() - began, "error": error}

    def checkpoints(self, run: str) -> dict[str, str]:
        """Each checkpoint that a resume would see, and whether it is whole."""
        found = {}
        place = RunDir(Path(run))
        for name in place.checkpoint_names():
            try:
                checkpoints.verify(place.checkpoints / name)
                found[name] = "whole"
            except (checkpoints.BadCheckpointError, OSError) as error:
                found[name] = str(error)
        return found

    def leftovers(self, run: str) -> list[str]:
        """What an unfinished save has left."""
        return sorted(path.name for path in RunDir(Path(run)).checkpoints.glob(".*"))

    # --- locks ---

    def take(self, path: str, primitive: str) -> str:
        """Takes a lock and keeps it; a hang shows in the answer that does not come."""
        try:
            self._held[Path(path)] = lock_operations.acquire(Path(path), primitive)
            return "got"
        except BlockingIOError:
            return "busy"
        except OSError as error:
            return words(error)

    def give_up(self, path: str, primitive: str) -> str:
        try:
            lock_operations.release(self._held.pop(Path(path)), primitive)
            return "released"
        except OSError as error:
            return words(error)

    def take_when_free(self, path: str, primitive: str, within_s: float) -> str:
        """Tries until it gets it, and gives it back at once; "busy" after that time."""
        answer = ""

        def got() -> bool:
            nonlocal answer
            try:
                lock_operations.release(
                    lock_operations.acquire(Path(path), primitive), primitive
                )
                answer = "got"
            except OSError as error:
                answer = "busy" if isinstance(error, BlockingIOError) else words(error)
            return answer == "got"

        _wait(got, within_s, 0.1)
        return answer

    def use_held(self, path: str) -> str:
        """What the holder of a lock sees when it writes to the file."""
        fd, _ = self._held[Path(path)]
        try:
            os.write(fd, b"still mine\n")
            os.fsync(fd)
            return "written"
        except OSError as error:
            return words(error)


def _content(number: int) -> dict[str, Any]:
    """Some pages, of another length each time."""
    return {"number": number, "fill": [number] * (number % 2000)}


def _read(path: str) -> str:
    return Path(path).read_text()


def _wait(ready: Any, timeout_s: float, pause_s: float = POLL_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True


if __name__ == "__main__":
    serve(Operations())
