"""What a module uses, in whichever way its source names it: also by an alias, or by `getattr`."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from pathlib import PurePath

_PACKAGE = "slurmft"
_IMPORTS = ("importlib.import_module", "__import__")
_OPENS = ("open", "io.open", "codecs.open", "os.fdopen", ".open")
_WRITING = frozenset("wax+")


def uses(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields what a module uses, with its lines.

    - `os.path.join`: a dotted name, whatever it was imported as, and what it begins with: `os`,
      `os.path`. A built-in function has its plain name.
    - `.join`: the last part of a name, of a module's or of any object's. Not of slurmft's own
      modules, whose functions may have the name of what they guard, as `files.write_text`.
    - `shell=`: an argument that is not False.
    - `command tar`: the first word of a command.
    - `open to read`, `open to write`, `Path.replace`, `import what is computed`, `take what is
      computed`.
    """
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for name in _names_of(node, aliases):
            yield name, line


def _aliases(tree: ast.AST) -> dict[str, str]:
    """Returns what each name means that a module imports, at the top or in a function."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                aliases[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return aliases


def _names_of(node: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield from _with_parts(alias.name)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield from _with_parts(f"{node.module}.{alias.name}")
    elif isinstance(node, ast.Name):
        yield from _with_parts(_dotted(node, aliases))
    elif isinstance(node, ast.Attribute):
        name = _dotted(node, aliases)
        yield from _with_parts(name) if name else (f".{node.attr}",)
    elif isinstance(node, ast.List | ast.Tuple):
        yield from _command(node.elts)
    elif isinstance(node, ast.Call):
        yield from _names_of_call(node, aliases)


def _names_of_call(node: ast.Call, aliases: dict[str, str]) -> Iterator[str]:
    for keyword in node.keywords:
        if not (isinstance(keyword.value, ast.Constant) and not keyword.value.value):
            yield f"{keyword.arg}="
    function = _dotted(node.func, aliases)
    if isinstance(node.func, ast.Attribute) and not function:
        function = f".{node.func.attr}"
    first = _text(node.args[0]) if node.args else None
    if function in _IMPORTS:
        yield from _with_parts(first or "")
        if first is None:
            yield "import what is computed"
    elif function == "getattr":
        yield from _names_of_getattr(node, aliases)
    elif function == "shutil.which":
        yield from _command(node.args)
    elif function in _OPENS:
        yield from _opens(node, function)
    elif function == ".replace" and len(node.args) == 1 and not node.keywords:
        yield "Path.replace"  # that of a text has two arguments


def _names_of_getattr(node: ast.Call, aliases: dict[str, str]) -> Iterator[str]:
    owner = _dotted(node.args[0], aliases)
    name = _text(node.args[1])
    if name is not None:
        if owner:
            yield from _with_parts(f"{owner}.{name}")
        yield f".{name}"
    elif owner:
        yield "take what is computed"


def _opens(node: ast.Call, function: str) -> Iterator[str]:
    # A path's own method has no path before the mode.
    place = 0 if function == ".open" else 1
    modes = node.args[place : place + 1]
    modes += [keyword.value for keyword in node.keywords if keyword.arg == "mode"]
    for mode in modes:
        text = _text(mode)
        is_mode = text is not None and set(text) <= set("rwaxbtU+")
        # Another method `open`, whose first argument is no mode.
        if function == ".open" and not is_mode:
            return
        if not is_mode or _WRITING & set(text or ""):
            yield "open to write"
            return
    yield "open to read"


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    """Returns the full name of what was imported or is built in; "": it is neither."""
    if isinstance(node, ast.Name):
        is_built_in = hasattr(builtins, node.id)
        return aliases.get(node.id, node.id if is_built_in else "")
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, aliases)
        return f"{owner}.{node.attr}".removeprefix("builtins.") if owner else ""
    return ""


def _with_parts(name: str) -> Iterator[str]:
    """Yields a dotted name, all that it begins with, and its last part."""
    name = name.removeprefix("builtins.")
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])
    if parts[0] != _PACKAGE:
        yield f".{parts[-1]}"


def _command(words: list[ast.expr]) -> Iterator[str]:
    first = _text(words[0]) if words else None
    # The first line of a script is no command.
    if first and not first.startswith("#!"):
        yield f"command {PurePath(first).name}"


def _text(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None
