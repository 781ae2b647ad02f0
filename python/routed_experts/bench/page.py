"""A run as an HTML page that needs no other file and no network: the picture of picture.py, with figures on hover."""

from __future__ import annotations

import html
import json
import math
from pathlib import Path
from typing import Any

from routed_experts.bench.crossings import Group, groups
from routed_experts.bench.picture import names_of, require, style, subtitle

# 1, 2, 5, 10 in place of powers of ten: multiples of the floor seldom span two of them.
_TICKS = [step * 10**power for power in range(-1, 4) for step in (1, 1.5, 2, 3, 5, 7)]

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>routed-experts bench</title>
<style>body{{font:15px system-ui,sans-serif;margin:1.5em;color:#222}}table{{border-collapse:collapse;margin:1em 0}}
td,th{{padding:.25em .8em;white-space:nowrap;border-bottom:1px solid #ddd;text-align:right}}
:is(td,th):first-child{{text-align:left}}
pre{{overflow:auto;background:#f6f6f6;padding:1em}}</style></head><body>
<h1>routed-experts bench</h1><p>{subtitle}</p><p><code>{command}</code></p>
{figure}
{tables}
<details><summary>Everything that was measured, as JSON</summary><pre>{data}</pre></details>
</body></html>
"""


def write_html(file: Path, report: dict[str, Any]) -> None:
    """Write the page.

    Raises:
        BackendUnavailable: plotly is not installed.
    """
    require("plotly")
    found = groups(report["rows"])
    page = _PAGE.format(
        subtitle=html.escape(subtitle(report)),
        command=html.escape(report["command"]),
        figure=_figure(found).to_html(full_html=False, include_plotlyjs=True) if found else "<p>no times</p>",
        tables="\n".join(map(_table, found)),
        data=html.escape(json.dumps(report, indent=1)),
    )
    file.write_text(page, encoding="utf-8")


def _figure(found: list[Group]) -> Any:
    from plotly.subplots import make_subplots

    titles = [f"{group.title}, {group.mode}" for group in found for _ in range(2)]
    figure = make_subplots(len(found), 2, subplot_titles=titles, vertical_spacing=0.25 / len(found))
    styles = style(names_of(found))
    shown: set[str] = set()
    for row, group in enumerate(found, 1):
        for column, per_floor in enumerate((False, True), 1):
            _panel(figure, row, column, group, styles, shown, per_floor)
    legend = {"orientation": "h", "yanchor": "bottom", "y": 1 + 0.1 / len(found)}
    figure.update_layout(height=460 * len(found) + 80, template="plotly_white", legend=legend)
    return figure


def _panel(
    figure: Any,
    row: int,
    column: int,
    group: Group,
    styles: dict[str, tuple[str, str]],
    shown: set[str],
    per_floor: bool,
) -> None:
    where = {"row": row, "col": column}
    counts = sorted(group.floor)
    lines = {**group.us, "floor": group.floor}
    for name, times in lines.items():
        here = [t for t in counts if t in times]
        values = [times[t] / (group.floor[t] if per_floor else 1) for t in here]
        dash = {"auto": "dash", "floor": "dot"}.get(name, "solid")
        line = {"color": styles.get(name, ("grey",))[0], "dash": dash}
        trace = {"x": here, "y": values, "name": name, "legendgroup": name, "line": line, "type": "scatter"}
        trace |= {"mode": "lines" if name == "floor" else "lines+markers", "showlegend": name not in shown}
        figure.add_trace(trace, **where)
        shown.add(name)
    figure.update_xaxes(
        type="log", tickvals=counts, ticktext=list(map(str, counts)), title_text="T, tokens in the call", **where
    )
    label = "multiple of the floor" if per_floor else "microseconds a call"
    figure.update_yaxes(type="log", title_text=label, tickvals=_TICKS if per_floor else None, **where)
    for tokens, _, after in group.crossings():
        figure.add_vline(tokens, line={"dash": "dashdot", "width": 1}, **where)
        # Shapes on a logarithmic axis stand at values, annotations at their logarithms.
        note = {"text": f"{after} from T={tokens:.0f}", "x": math.log10(tokens), "y": 0.98, "yref": "y domain"}
        note |= {"xanchor": "left", "yanchor": "top", "showarrow": False}
        figure.add_annotation(textangle=-90, font={"size": 10}, **note, **where)


def _table(group: Group) -> str:
    counts = sorted(group.floor)
    cells = [f"<th>{html.escape(group.title)}, {group.mode}: us (x floor)</th>", *(f"<th>T={t}</th>" for t in counts)]
    lines = ["".join(cells)]
    for name, times in {**group.us, "floor": group.floor}.items():
        values = (f"{times[t]:.1f} ({times[t] / group.floor[t]:.2f})" if t in times else "" for t in counts)
        lines.append(f"<td>{html.escape(name)}</td>" + "".join(f"<td>{value}</td>" for value in values))
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
