"""Two pictures of a benchmark: acceptance by depth, and tokens per second by category.

Colours are from the Okabe-Ito set (safe for the common kinds of colour blindness); lines also differ by marker.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from specheads.evaluation.record import BenchmarkReport, Row
from specheads.evaluation.runs import HF, PLAIN
from specheads.utils import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, DARK_GREY = "#BBBBBB", "#666666"  # the two systems without a draft
COLOURS = {"lookup": "#E69F00", "head": "#56B4E9", "joined": "#0072B2"}
OTHERS = ("#009E73", "#D55E00", "#CC79A7")
MARKERS = "os^Dvp"


def colours(names: list[str]) -> dict[str, str]:
    """A colour of its own for every drafter; the usual ones always have the same."""
    free = iter(OTHERS * (1 + len(names)))
    return {name: COLOURS.get(name) or next(free) for name in names}


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Figure, path: str | Path) -> None:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


def _subtitle(report: BenchmarkReport) -> str:
    return f"{Path(report.target).name} · {report.suite}, {report.overall.prompts} prompts · {report.dtype}"


def plot_acceptance(report: BenchmarkReport, path: str | Path) -> None:
    """Share of steps in which at least d drafts were accepted, a line for each drafter."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _figure(6.4, 4.0)
    palette = colours(list(report.by_drafter))
    for index, (name, row) in enumerate(report.by_drafter.items()):
        shares = row.acceptance_by_depth
        label = f"{name} (τ = {row.tau:.2f})" if row.tau is not None else name
        axes.plot(
            range(1, len(shares) + 1),
            shares,
            color=palette[name],
            marker=MARKERS[index % len(MARKERS)],
            label=label,
            clip_on=False,
            zorder=3,
            linewidth=2.2 if name == report.default_drafter else 1.5,
        )
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.0f} %")
    axes.set_xlabel("depth: at least so many drafts accepted")
    axes.set_ylabel("share of steps")
    axes.set_title(f"Acceptance by depth\n{_subtitle(report)}", fontsize=10)
    axes.legend(frameon=False)
    _save(figure, path)


def plot_speed(report: BenchmarkReport, path: str | Path) -> None:
    """Tokens per second by category: HF generate, the plain loop, and every drafter."""
    bars = _speeds(report)
    places = list(next(iter(bars.values())))
    palette = {HF: GREY, PLAIN: DARK_GREY, **colours(list(report.by_drafter))}
    figure, axes = _figure(max(6.4, 1.8 + 0.17 * len(places) * len(bars)), 4.2)
    width = 0.82 / len(bars)
    for index, (name, speeds) in enumerate(bars.items()):
        offset = (index - (len(bars) - 1) / 2) * width
        xs = [place + offset for place in range(len(places))]
        axes.bar(xs, [speeds[place] for place in places], width * 0.94, color=palette[name], label=name)
        last = speeds[places[-1]]
        axes.text(xs[-1], last, f" {last:.0f}", ha="center", va="bottom", fontsize=7, rotation=90)
    axes.axvline(len(places) - 1.5, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(places)), places, rotation=25, ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.55, len(places) - 0.45)
    axes.margins(y=0.12)
    axes.set_ylabel("new tokens per second")
    axes.set_title(f"Tokens per second by category, one prompt at a time\n{_subtitle(report)}", fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(bars), frameon=False)
    _save(figure, path)


def _speeds(report: BenchmarkReport) -> dict[str, dict[str, float]]:
    """System -> category -> tokens per second; the overall value last."""
    several = len({row.suite for row in report.rows}) > 1

    def place(row: Row) -> str:
        return "overall" if row.category == "all" else f"{row.suite}/{row.category}" if several else row.category

    def pick(rows: list[Row], attribute: str) -> Mapping[str, float]:
        return {place(row): getattr(row, attribute) for row in rows}

    bars: dict[str, dict[str, float]] = {}
    for name, total in report.by_drafter.items():
        rows = [row for row in report.rows if row.drafter == name] + [total]
        bars.setdefault(HF, dict(pick(rows, "hf_tokens_per_s")))
        bars.setdefault(PLAIN, dict(pick(rows, "baseline_tokens_per_s")))
        bars[name] = dict(pick(rows, "tokens_per_s"))
    return bars
