"""A report as one HTML file that needs nothing else: no server, no network, no other file."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping, Sequence
from typing import Any

from slurmft.studies.report.plots import HINT, inline
from slurmft.studies.report.sections import Section, slug

TEMPLATE = "report.html"


def page(
    title: str,
    sections: Sequence[Section],
    drawn: Mapping[str, str],
    told: Sequence[str],
    problems: Sequence[str],
) -> str:
    """The report.

    Args:
        title: of the page.
        sections: what it holds.
        drawn: the plots: `Section.file_of` -> SVG; without those that were not drawn.
        told: what made the page, when, and from what.
        problems: what could not be read.
    """
    import jinja2  # 60 ms

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    folder = importlib.resources.files("slurmft") / "templates"
    template = environment.from_string((folder / TEMPLATE).read_text(encoding="utf-8"))
    shown = [_shown(section, drawn) for section in sections]
    hint = HINT if any(s.charts for s in sections) and not drawn else ""
    return template.render(title=title, sections=shown, told=told, hint=hint, problems=problems)


def _shown(section: Section, drawn: Mapping[str, str]) -> dict[str, Any]:
    """A section as the template takes it."""
    import markupsafe

    plots = []
    for chart in section.charts:
        name = section.file_of(chart)
        if name in drawn:
            prefix = slug(name)
            svg = markupsafe.Markup(inline(drawn[name], chart, prefix))
            plots.append({"chart": chart, "svg": svg, "table": chart.table(), "id": prefix})
    return {"section": section, "plots": plots}
