"""Texts for others to run or to read: templates, beside the modules that fill them."""

import shlex
from pathlib import Path
from typing import Any


def fill(template: Path, **values: Any) -> str:
    """The text of a template of Jinja's. For shells, `quote` makes one word of a text, and `words`
    a command of a list."""
    import jinja2  # 60 ms

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {"quote": shlex.quote, "words": shlex.join}
    text = template.read_text(encoding="utf-8")
    return environment.from_string(text).render(values)
