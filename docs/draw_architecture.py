"""Draws docs/architecture.svg: the layers of the import contract, and the packages in them.

    python docs/draw_architecture.py            writes the drawing
    python docs/draw_architecture.py --check    fails if it is not what would be written

The layers come from the contract in pyproject.toml, the purpose of a package from the first line of
its docstring, what it imports from its code. Needs grimp, which comes with import-linter.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

COLOURS = {"train": "#2a7150", "job": "#a84a12"}
"""Colours of the trainer and the door; white text is readable on all, on light and dark pages."""
KERNEL = "#2c5a8c"
PLUGIN = "#6b4a86"
PLUGINS = "plugins"
"""The package whose members have a box each."""
OUTSIDE = "#7d8590"
"""Of text beside the boxes: readable on white and on black."""

WIDTH, LEFT, GAP, PADDING = 960, 44, 10, 14
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
CHARACTER = 7.0
"""Width of a character of the small text, with some room for wider fonts."""


@dataclass(frozen=True)
class Part:
    """A package, or a module on the top floor."""

    name: str
    purpose: str
    modules: int
    imports: list[str]

    @property
    def facts(self) -> str:
        """Its size and what it imports, in a line."""
        count = "1 module" if self.modules == 1 else f"{self.modules} modules"
        return f"{count} \N{MIDDLE DOT} imports {', '.join(self.imports) or 'nothing'}"


def layers(root: Path) -> tuple[str, list[list[str]]]:
    """The package of the contract, and the names of each layer, from the top."""
    with open(root / "pyproject.toml", "rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    contract = next(c for c in contracts if c["type"] == "layers")
    package = contract["containers"][0]
    rows: list[list[str]] = []
    for layer in contract["layers"]:
        names = [name.strip(" ()") for name in re.split(r"[|:]", layer)]
        rows += plugin_rows(root / package) if names == [PLUGINS] else [names]
    return package, rows


def plugin_rows(package: Path, columns: int = 4) -> list[list[str]]:
    """The names of the plug-ins, as rows of boxes."""
    names = sorted(
        file.parent.name for file in (package / PLUGINS).glob("*/__init__.py")
    )
    full = [f"{PLUGINS}.{name}" for name in names]
    return [full[start : start + columns] for start in range(0, len(full), columns)]


def parts(root: Path) -> list[list[Part]]:
    """The parts of each layer, from the top."""
    import grimp

    package, names = layers(root)
    sys.path.insert(0, str(root))
    graph = grimp.build_graph(
        package, cache_dir=None, exclude_type_checking_imports=True
    )
    order = [name for layer in names for name in layer]

    def part(name: str) -> Part:
        module = f"{package}.{name}"
        inside = {module, *graph.find_descendants(module)}
        targets = {
            t for m in inside for t in graph.find_modules_directly_imported_by(m)
        } - inside
        found = {target.split(".")[1] for target in targets if "." in target}
        imports = [other for other in order if other in found]
        place = root / package / name.replace(".", "/")
        return Part(name, purpose(place), len(inside), imports)

    return [[part(name) for name in layer] for layer in names]


def purpose(path: Path) -> str:
    """The first line of the docstring of a package or module."""
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].rstrip(".").replace("`", "")


def draw(layers: list[list[Part]]) -> str:
    """The drawing, as SVG."""
    shapes: list[str] = []
    top = 0
    for layer in layers:
        width = (WIDTH - LEFT - GAP * (len(layer) - 1)) / len(layer)
        texts = [lines(part, width) for part in layer]
        height = 40 + 18 * max(map(len, texts))
        for i, (part, text) in enumerate(zip(layer, texts, strict=True)):
            shapes += box(part, text, LEFT + i * (width + GAP), top, width, height)
        top += height + GAP
    shapes += [*arrow(top - GAP), *legend(top + 14)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 24}" '
        f'width="{WIDTH}" height="{top + 24}" font-family="{FONT}" font-size="13" role="img" '
        'aria-label="Packages in layers; each imports only packages below it">'
    )
    return "\n".join([head, *shapes, "</svg>"]) + "\n"


def colour_of(part: Part) -> str:
    """The colour of a box."""
    return PLUGIN if part.name.startswith(PLUGINS) else COLOURS.get(part.name, KERNEL)


def lines(part: Part, width: float) -> list[tuple[str, str]]:
    """What a box says below the name, line by line, with its colour."""
    characters = int((width - 2 * PADDING) / CHARACTER)
    texts = ((part.purpose, "#ffffff"), (part.facts, "#ccd9e6"))
    return [
        (line, colour)
        for text, colour in texts
        for line in textwrap.wrap(text, characters)
    ]


def box(
    part: Part,
    text: list[tuple[str, str]],
    x: float,
    y: float,
    width: float,
    height: float,
) -> Iterator[str]:
    """A part: its name, its purpose, its facts."""
    place = f'x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}"'
    yield f'<rect {place} rx="6" fill="{colour_of(part)}"/>'
    x += PADDING
    yield (
        f'<text x="{x:.0f}" y="{y + 25}" fill="#ffffff" font-family="{MONO}" font-size="15" '
        f'font-weight="600">{escape(part.name.rpartition(".")[2])}</text>'
    )
    for i, (line, colour) in enumerate(text):
        place = f'x="{x:.0f}" y="{y + 45 + 18 * i}"'
        yield f'<text {place} fill="{colour}">{escape(line)}</text>'


def arrow(bottom: int) -> Iterator[str]:
    """Down the left side: which way imports go."""
    x, middle = 26, bottom // 2
    yield f'<path d="M{x} 4V{bottom - 8}" stroke="{OUTSIDE}" stroke-width="1.5" fill="none"/>'
    yield f'<path d="M{x - 5} {bottom - 12}h10l-5 10z" fill="{OUTSIDE}"/>'
    turn = f"rotate(-90 14 {middle})"
    yield (
        f'<text x="14" y="{middle}" fill="{OUTSIDE}" text-anchor="middle" transform="{turn}">'
        "imports only what stands below</text>"
    )


def legend(y: int) -> Iterator[str]:
    """What the colours mean."""
    kinds = {
        "the kernel": KERNEL,
        "the door": COLOURS["job"],
        "the trainer": COLOURS["train"],
        "plug-ins": PLUGIN,
    }
    for i, (words, colour) in enumerate(kinds.items()):
        x = LEFT + 110 * i
        yield f'<rect x="{x}" y="{y - 10}" width="11" height="11" rx="2" fill="{colour}"/>'
        yield f'<text x="{x + 18}" y="{y}" fill="{OUTSIDE}">{words}</text>'


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Draws the layers of the import contract."
    )
    parser.add_argument(
        "--check", action="store_true", help="fail if the drawing is not true"
    )
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).resolve().parent.parent
    )
    arguments = parser.parse_args()
    file, text = arguments.root / "docs/architecture.svg", draw(parts(arguments.root))
    if not arguments.check:
        file.write_text(text, encoding="utf-8")
        return 0
    if file.is_file() and file.read_text(encoding="utf-8") == text:
        return 0
    print(f"error: {file} is not what the code says", file=sys.stderr)
    print("hint: python docs/draw_architecture.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
