"""ssh and rsync to a cluster: OpenSSH and rsync do the work, with the user's own keys, known hosts
and configuration."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from slurmft.core import bash, descent, ownership, process
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.text import in_bytes
from slurmft.core.trusted import MARK, Door, NotOwnError, for_children
from slurmft.plugins.remote.clusters import Cluster, word

SOCKETS = Door(
    "the folder of ssh's shared connections",
    "`$XDG_RUNTIME_DIR/` or `~/.ssh/`",
    "where commands to a cluster go; without it, each makes a connection of its own",
)

_CUT = 255
"""ssh's exit code where there is no connection, or it was cut."""
_RSYNC_CUT = (10, 12, 20, 30, 35, _CUT)
"""rsync's: errors of sockets and of its protocol, an interrupt, timeouts, and ssh's own code."""
# No questions: nobody may be there to answer. A dead connection ends within a minute.
_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=15",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
)


_MOST_ANSWER_BYTES = 64 * 2**20
"""The largest answer that is read: the names of a million files."""
_ANY_NAME = "surrogateescape"
"""How names of files that are no UTF-8 are read and written."""
_ONCE = "nothing is submitted twice"


_REFUSED = "error: "
_FETCH = "fetch from"
_OTHER_FOLDER = "name another folder in clusters.toml, or have that one removed"

_ENTERING = Path(__file__).with_name("entering.bash")


def entering_own(folder: str) -> str:
    """Returns commands of bash that enter a folder, and make it where it is absent; they fail where
    slurmft may not have made it for this user alone: others can guess its name."""
    problem = f"{folder} is another user's, or a link, or others may have put it there"
    text = shlex.quote(f"{_REFUSED}{problem}\nhint: {_OTHER_FOLDER}")
    functions = f"{bash.functions(ownership.BASH)}; {bash.functions(_ENTERING)}"
    enter = f"slurmft_enter {word(folder)} {MARK}"
    return f"{functions}; {enter} || {{ echo {text} >&2; false; }}"


def entering(path: str, inode: int | None) -> str:
    """Returns commands of bash that enter a folder; they fail where it is absent.

    Args:
        inode: they also fail where it is another than the one with this inode, of this user or
            root; None: it may be anybody's.
    """
    text = shlex.quote(f"{_REFUSED}cannot enter {path}")
    enter = f"CDPATH= cd {word(path)} || {{ echo {text} >&2; false; }}"
    if inode is None:
        return enter
    functions = bash.functions(ownership.BASH)
    text = shlex.quote(
        f"{_REFUSED}another folder has the name by now{descent.OR_INODE}"
    )
    check = f"slurmft_is_same . {inode} || {{ echo {text} >&2; false; }}"
    return f"{functions}; {{ {enter}; }} && {{ {check}; }}"


def was_cut(done: "subprocess.CompletedProcess[str]") -> bool:
    """Returns whether ssh has ended without the end of the command there: there was no connection,
    it was cut, or ssh itself was killed."""
    return done.returncode == _CUT or done.returncode < 0


class Connection:
    """One cluster, by ssh; one connection serves all commands of the next ten minutes."""

    def __init__(self, cluster: Cluster, command: str) -> None:
        self.cluster = cluster
        self.command = command
        """The command line that was typed here, for messages."""
        # The command may have options of its own: "ssh -F FILE".
        self._ssh = shlex.split(cluster.ssh)
        for program in (self._ssh[0], "rsync"):
            if not shutil.which(program):
                problem = f"--on needs {program}, which is not on the PATH"
                raise UsageError(problem, "install it")
        # Before our options are there: ssh would print these as the user's.
        sharing = self._sharing()
        for option in (*_OPTIONS, *sharing):
            self._ssh += ["-o", option]

    def _sharing(self) -> list[str]:
        """Returns the options of a shared connection, unless the user's configuration has some."""
        command = [*self._ssh, "-G", self.cluster.host]
        done = process.run(command, None)
        for line in done.stdout.splitlines():
            # ssh prints controlpath only where there is one.
            if line.startswith("controlpath "):
                return []
        place = os.environ.get("XDG_RUNTIME_DIR") or "~/.ssh"
        folder = Path(place).expanduser()
        # A socket's path has 107 bytes at most: 40 of a hash, and 17 of ssh's own.
        if len(str(folder)) > 40:
            return []
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            # Whoever listens there in place of ssh gets the commands, and answers them.
            with SOCKETS.folder(folder):
                is_usable = os.access(folder, os.W_OK)
        except (OSError, NotOwnError):
            return []
        if not is_usable:
            return []
        return [
            "ControlMaster=auto",
            f"ControlPath={folder}/sft-%C",
            "ControlPersist=10m",
        ]

    def run(
        self,
        script: str,
        *,
        capture: bool = False,
    ) -> "subprocess.CompletedProcess[str]":
        """Runs a bash script on the cluster, in a terminal where there is one here."""
        has_terminal = not capture and sys.stdin.isatty() and sys.stdout.isatty()
        options = ["-T"]
        if has_terminal:
            # -tt: Ctrl-C ends the command there; -q: no "Connection closed" at the end.
            options = ["-tt", "-q"]
        # A login shell: it has the PATH, and `module`, that the user has there.
        command = [*self._ssh, *options, "--", self.cluster.host]
        command.append(f"exec bash -lc {shlex.quote(script)}")
        sys.stdout.flush()  # what the command prints comes after what was printed here
        if not capture:
            return subprocess.CompletedProcess(command, subprocess.call(command))
        return self._captured(command)

    def _captured(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Runs ssh, and reads what the command there prints.

        Raises:
            SlurmftError: it is more than a command of slurmft's prints.
        """
        with subprocess.Popen(
            command,
            # Several clusters may be asked at once: none of them may take the others' input.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as child:
            try:
                printed, errors = process.read_bounded(child, _MOST_ANSWER_BYTES)
            finally:
                # Without effect where it has ended.
                child.kill()
        if len(printed) > _MOST_ANSWER_BYTES:
            raise SlurmftError(
                f"the answer of {self.cluster.name} is larger than "
                f"{in_bytes(_MOST_ANSWER_BYTES)}",
                "look at what it prints: without --json, or by ssh",
            )
        outputs = [text.decode(errors=_ANY_NAME) for text in (printed, errors)]
        return subprocess.CompletedProcess(command, child.returncode, *outputs)

    def send(
        self,
        root: Path,
        names: Iterable[str],
        folder: str,
        copy_links: bool = False,
    ) -> None:
        """Sends files and folders, named by their paths below `root`, into a folder there. Those
        that are named and are not here any more are removed there.

        Args:
            copy_links: in the place of links come the files that they lead to.

        Raises:
            SlurmftError: the connection was cut, or a file cannot be read or written.
        """
        options = ["-r", "--from0", "--files-from=-", "--delete-missing-args"]
        # rsync starts its other end by a shell command, which can make and enter the folder first.
        options.append(_starting_after(entering_own(folder)))
        target = f"{self.cluster.host}:./"
        names_with_zeros = "\0".join(names)  # --from0: a name may have a line break
        if copy_links:
            options.append("--copy-links")
        # -s: names are no words of a shell there.
        command = ["-as", *options, f"{root}/", target]
        self._rsync(command, "send to", names_with_zeros)

    def fetch(
        self,
        enter: str,
        into: Path,
        *options: str,
        names: Iterable[str] | None = None,
    ) -> None:
        """Fetches a folder's regular files and folders from there into a folder here. Links,
        devices, FIFOs and the like stay there, and so do owners and set-uid bits.

        Args:
            enter: commands of bash that enter the folder there, and fail where it is not the one
                that is meant: where others can rename, theirs may have the name by now.
            into: it may lead through a descriptor of this process.
            names: paths of files below the folder; None: it comes whole.

        Raises:
            SlurmftError: the connection was cut, or there is no such folder.
        """
        into.mkdir(parents=True, exist_ok=True)
        # Not -a, of which -rts is what is left: without --perms no special bits come, either.
        command = ["-rts", *options, _starting_after(enter)]
        names_with_zeros = ""
        if names is not None:
            command += ["--from0", "--files-from=-"]
            names_with_zeros = "\0".join(names)
        # With a slash, rsync means what is in a folder.
        arguments = [*command, f"{self.cluster.host}:./", f"{for_children(into)}/"]
        self._rsync(arguments, _FETCH, names_with_zeros)

    def fetch_output(self, folder: str, into: Path) -> None:
        """Fetches what a command has written there, a file or a folder, under the name that it has
        here. Nothing else of the folder comes: whoever answers in the place of the cluster would
        choose names in a folder of the user's.

        Raises:
            SlurmftError: the connection was cut, or there is nothing of this name.
        """
        # A folder of its user alone: nobody else puts anything there.
        enter = entering_own(folder)
        inner = shlex.quote(f"./{into.name}")
        script = f"{{ {enter}; }} && if [ -d {inner} ]; then echo folder; fi"
        done = self.run(script, capture=True)
        if was_cut(done):
            raise self.no_connection(done)
        # A login shell may have printed a greeting before.
        if done.stdout.splitlines()[-1:] == ["folder"]:
            self.fetch(f"{{ {enter}; }} && CDPATH= cd {inner}", into)
            return
        into.parent.mkdir(parents=True, exist_ok=True)
        source = f"{self.cluster.host}:./{_without_wildcards(into.name)}"
        arguments = ["-ts", _starting_after(enter), source, str(into)]
        self._rsync(arguments, _FETCH)

    def _rsync(self, arguments: Sequence[str], action: str, names: str = "") -> None:
        """Runs rsync. `action` is what it does, in messages; `names` goes to its stdin."""
        # rsync splits --rsh at spaces outside of quotes; it knows no backslashes.
        quoted_parts = []
        for part in self._ssh:
            if " " in part:
                part = f"'{part}'"
            quoted_parts.append(part)
        shell = " ".join(quoted_parts)
        # --partial: what was cut off stays, and the same command goes on from it.
        command = [
            "rsync",
            "--compress",
            "--partial",
            f"--rsh={shell}",
            *arguments,
        ]
        if sys.stderr.isatty():
            command.insert(1, "--info=progress2")
        done = self._fed(command, names)
        for line in done.stderr.splitlines():
            if line.startswith(_REFUSED):
                problem = line.removeprefix(_REFUSED)
                hint = _OTHER_FOLDER
                if action == _FETCH:
                    hint = f"what is there: slurmft list --on {self.cluster.name}"
                raise SlurmftError(f"{self.cluster.name}: {problem}", hint)
        if done.returncode in _RSYNC_CUT or done.returncode < 0:
            raise self.no_connection(done)
        if done.returncode:
            lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
            hint = "the same command goes on"
            if "has no referent" in lines[0]:
                hint = f"remove the link, or write its target; then {hint}"
            raise SlurmftError(
                f"rsync could not {action} {self.cluster.name}: {lines[0]}", hint
            )

    def _fed(
        self, command: Sequence[str], names: str
    ) -> "subprocess.CompletedProcess[str]":
        """Runs rsync with names on its standard input; reads the end of what it complains about."""
        with process.unnamed_file() as input_file:
            input_file.write(names.encode(errors=_ANY_NAME))
            input_file.seek(0)
            with (
                subprocess.Popen(
                    command,
                    stdin=input_file,
                    stdout=sys.stderr,  # progress; stdout is for what the command prints there
                    stderr=subprocess.PIPE,
                ) as child
            ):
                try:
                    _, errors = process.read_bounded(child, 0)
                finally:
                    child.kill()
        complaints = errors.decode(errors=_ANY_NAME)
        return subprocess.CompletedProcess(command, child.returncode, "", complaints)

    def no_connection(self, done: "subprocess.CompletedProcess[str]") -> SlurmftError:
        """Returns the error of a connection that could not be made, or was cut."""
        name = self.cluster.name
        if done.returncode < 0:
            signal_name = process.signal_name(-done.returncode)
            return SlurmftError(
                f"the connection to {name} is gone: {done.args[0]} was killed by {signal_name}",
                f"the same command again: {self.command}; {_ONCE}",
                Exit.SUBMIT,
            )
        # The lines of ssh say more than those that rsync adds to them.
        stderr = done.stderr or ""
        lines = [line for line in stderr.splitlines() if "rsync" not in line]
        reason = ""
        if lines:
            reason = f": {lines[-1].strip()}"
        host = shlex.quote(self.cluster.host)
        return SlurmftError(
            f"no connection to {name}, or it was cut{reason}",
            f"{self.cluster.ssh} {host} must work without a question; then the same command again: "
            f"{self.command}; {_ONCE}",
            Exit.SUBMIT,
        )


def _starting_after(script: str) -> str:
    """Returns rsync's option by which its other end starts once a shell script has succeeded."""
    # The login shell there may be no bash, and has to pass the words of rsync on.
    script = f'{{ {script}; }} && exec rsync "$@"'
    return f"--rsync-path=bash -c {shlex.quote(script)} bash"


def _without_wildcards(path: str) -> str:
    """Returns a path of a source as rsync takes it: it would send another folder, which somebody
    has made there, in the place of one with wildcards in its name."""
    if not any(character in path for character in "*?["):
        return path
    escaped = path.replace("\\", r"\\")
    return re.sub(r"[*?[]", r"[\g<0>]", escaped)
