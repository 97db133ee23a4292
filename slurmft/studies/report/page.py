"""A report as one HTML file that needs no server, network or other file."""

from __future__ import annotations

import base64
import importlib.resources
from collections.abc import Mapping, Sequence

from slurmft.studies.report.plots import HINT
from slurmft.studies.report.sections import Section


def page(
    title: str,
    sections: Sequence[Section],
    drawn: Mapping[str, str],
    origin: str,
    problems: Sequence[str],
) -> str:
    """The report.

    Args:
        title: of the page.
        sections: what it holds.
        drawn: the plots: `Section.file_of` -> SVG; without those that were not drawn.
        origin: what made the page, when, and from what.
        problems: what could not be read.
    """
    import jinja2  # 60 ms

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = importlib.resources.files(__package__).joinpath("report.html")
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        title=title,
        sections=sections,
        images={
            name: base64.b64encode(svg.encode("utf-8", "replace")).decode()
            for name, svg in drawn.items()
        },
        origin=origin,
        hint=HINT if any(s.charts for s in sections) and not drawn else "",
        problems=problems,
    )
