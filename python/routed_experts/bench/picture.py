"""A run as a PNG: time and multiple of the floor against T, with the crossings marked."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routed_experts.bench.crossings import Group, groups
from routed_experts.errors import BackendUnavailable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart by people who do not see red and green alike (Okabe and Ito), and by their marks in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B")
_MARKS = "os^Dv<>P"


def require(package: str) -> None:
    """Raise BackendUnavailable unless a plotting package can be imported."""
    if find_spec(package) is None:
        raise BackendUnavailable(
            f"a picture needs {package}",
            found=f"{package} is not installed",
            needed=package,
            hint="pip install 'routed-experts[bench]'",
        )


def style(names: list[str]) -> dict[str, tuple[str, str]]:
    """Colour and mark of each candidate, the same in every panel."""
    return {name: (COLOURS[i % len(COLOURS)], _MARKS[i % len(_MARKS)]) for i, name in enumerate(names)}


def names_of(found: list[Group]) -> list[str]:
    """The candidates of all groups, in order of appearance."""
    return list(dict.fromkeys(name for group in found for name in group.us))


def write_png(file: Path, report: dict[str, Any]) -> None:
    """Draw every group as a row of two panels.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
    require("matplotlib")
    from matplotlib.figure import Figure

    found = groups(report["rows"])
    figure = Figure(figsize=(13, max(1, len(found)) * 4.6 + 1.2), layout="constrained")
    styles = style(names_of(found))
    axes = figure.subplots(max(1, len(found)), 2, squeeze=False)
    for (left, right), group in zip(axes, found, strict=False):
        _panel(left, group, styles, per_floor=False)
        _panel(right, group, styles, per_floor=True)
    handles = {label: handle for row in axes for ax in row for handle, label in zip(*_legend(ax), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(subtitle(report), fontsize=10)
    figure.savefig(file, dpi=120, format="png")


def _legend(ax: Axes) -> tuple[list[Any], list[str]]:
    handles, labels = ax.get_legend_handles_labels()
    return handles, labels


def subtitle(report: dict[str, Any]) -> str:
    """Machine, versions and date of a run in a line."""
    machine, versions = report["machine"], report["versions"]
    where = machine.get("device") or f"{machine.get('cpu', 'CPU')}, {machine['threads']} threads"
    return f"{where}; " + ", ".join(f"{name} {one}" for name, one in versions.items()) + f"; {report['date']}"


def _panel(ax: Axes, group: Group, styles: dict[str, tuple[str, str]], *, per_floor: bool) -> None:
    counts = sorted(group.floor)
    for name, times in group.us.items():
        colour, mark = styles[name]
        here = [t for t in counts if t in times]
        values = [times[t] / (group.floor[t] if per_floor else 1) for t in here]
        dashed = "--" if name == "auto" else "-"
        ax.plot(here, values, dashed, color=colour, marker=mark, markersize=6, label=name, alpha=0.9)
    lowest = [1.0 if per_floor else group.floor[t] for t in counts]
    ax.plot(counts, lowest, ":", color="grey", label="floor")
    _mark_crossings(ax, group)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(counts, [str(t) for t in counts])
    ax.minorticks_off() if per_floor else None
    if per_floor:
        _plain_ticks(ax)
    ax.grid(True, which="both", alpha=0.2)
    ax.set_xlabel("T, tokens in the call")
    ax.set_ylabel("multiple of the floor" if per_floor else "microseconds a call")
    ax.set_title(f"{group.title}, {group.mode}", fontsize=10)


def _plain_ticks(ax: Axes) -> None:
    """1, 2, 5, 10 in place of powers of ten: multiples of the floor seldom span two of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 1.5, 2, 3, 5, 7)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _mark_crossings(ax: Axes, group: Group) -> None:
    for tokens, _, after in group.crossings():
        ax.axvline(tokens, color="black", linewidth=0.8, linestyle="-.")
        ax.annotate(
            f"{after} from T={tokens:.0f}",
            (tokens, 0.98),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            rotation=90,
            va="top",
            fontsize=8,
            bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1},
        )
