"""Draws docs/images: what slurmft shows, of runs that this script makes (about three minutes).

    python docs/draw_screens.py

A small study trains on simulated nodes of this machine. `slurmft watch` draws on an emulated
terminal of 80 columns; chromium draws the page of `slurmft report`. Needs the extra `test`.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

import pyte
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.style import Style
from rich.text import Text

IMAGES = Path(__file__).resolve().parent / "images"
COLUMNS, LINES = 80, 20
STUDY = """\
name = "rates"
title = "Learning rates of a small encoder"
repeats = 2
[fixed]
nodes = 2
max_steps = 60
[grid]
learning_rate = [3e-4, 1e-3, 3e-3]
"""


def slurmft(*words: str) -> list[str]:
    return [sys.executable, "-m", "slurmft", *words]


def watched(folder: Path) -> pyte.Screen:
    """The terminal of `slurmft watch last`, when the second half of the run has begun."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.update(TERM="xterm-256color", LC_ALL="C.UTF-8")
        os.execvp(sys.executable, slurmft("watch", "last"))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    while not re.search(r"\b[5-9]\d%  step", "\n".join(screen.display)):
        stream.feed(os.read(terminal, 65536))
    os.close(terminal)
    os.waitpid(pid, 0)
    return screen


def draw_terminal(screen: pyte.Screen, title: str, file: Path) -> None:
    """A terminal's screen, as SVG."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    filled = [y for y, line in enumerate(screen.display) if line.strip()]
    for y in range(max(filled) + 1):
        text = Text()
        for x in range(COLUMNS):
            cell = screen.buffer[y][x]
            text.append(cell.data, Style(color=colour(cell.fg), bold=cell.bold))
        text.rstrip()
        console.print(text)
    svg = console.export_svg(title=title, unique_id="slurmft")
    # No fonts from afar.
    file.write_text(re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL))


def colour(name: str) -> str | None:
    """A colour of pyte's, for rich."""
    if name == "default":
        return None
    is_rgb = len(name) == 6 and all(c in "0123456789abcdef" for c in name)
    plain = name.replace("bright", "bright_").replace("brown", "yellow")
    return f"#{name}" if is_rgb else plain


def draw_page(page: Path, file: Path) -> None:
    """The upper part of a page, as a browser shows it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        tab = browser.new_page(viewport={"width": 1100, "height": 820})
        tab.goto(page.as_uri())
        tab.screenshot(path=str(file))
        browser.close()


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ("--cluster", "local", "--nodes", "2", "--max-steps", "300")
        subprocess.run(slurmft("submit", *flags), cwd=folder, check=True)
        draw_terminal(watched(folder), "slurmft watch last", IMAGES / "watch.svg")
        subprocess.run(slurmft("follow", "last"), cwd=folder, check=True)
        (folder / "rates.toml").write_text(STUDY)
        subprocess.run(
            slurmft("study", "run", "rates.toml", "--cluster", "local"),
            cwd=folder,
            check=True,
        )
        subprocess.run(
            slurmft("report", "studies/rates", "--output", "report"),
            cwd=folder,
            check=True,
        )
        draw_page(folder / "report/report.html", IMAGES / "report.png")
        shutil.copyfile(folder / "report/rates-loss.svg", IMAGES / "loss.svg")


if __name__ == "__main__":
    main()
