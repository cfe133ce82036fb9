"""The benchmark for people: tables on the screen, ``report.md``, ``report.json`` and two pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specheads.evaluation.divergence import PLAIN_WORDS
from specheads.evaluation.record import BenchmarkReport, Row
from specheads.utils import write_json, write_text

if TYPE_CHECKING:
    from rich.console import Console

REPORT_FILE = "report.json"
COLUMNS = (
    "suite/category",
    "τ",
    "acceptance by depth",
    "HF generate tok/s",
    "plain loop tok/s",
    "with draft tok/s",
    "speed-up over HF",
    "speed-up over plain loop",
    "same tokens",
)
HEADINGS = dict(
    zip(
        COLUMNS,
        (
            "suite/\ncategory",
            "τ",
            "acceptance\nby depth",
            "HF\ngenerate\ntok/s",
            "plain\nloop\ntok/s",
            "with\ndraft\ntok/s",
            "speed-up\nover\nHF",
            "speed-up\nover\nplain\nloop",
            "same\ntokens",
        ),
        strict=True,
    )
)
DEPTHS_SHOWN = 4  # the rest stand in report.json and in the picture

MEANINGS = """\
- **τ**: tokens emitted per forward of the target, the bonus token counted. 1.0 would be plain decoding.
- **acceptance by depth**: share of steps in which at least 1, 2, 3, … drafts were accepted (joint, not conditional).
  τ = 1 + their sum, less what an end of text or the length limit cut off.
- **HF generate**: `transformers` `generate` of the same model, dtype and prompts. **plain loop**: this package's own
  decoding without a draft. **with draft**: speculative decoding. New tokens (counted from ids) over wall time,
  prefill included, one prompt at a time.
- **speed-up**: the median over the repeats; every repeat runs all systems in turn on every prompt.
- **same tokens**: share of prompts whose tokens are exactly those of HF generate.
"""


def _share(value: float) -> str:
    return "100 %" if value == 1 else f"{value * 100:.1f} %"


def cells(row: Row) -> list[str]:
    """One line of the table, in the order of ``COLUMNS``."""
    depths = " ".join(f"{share:.2f}" for share in row.acceptance_by_depth[:DEPTHS_SHOWN])
    return [
        row.category if row.category != "all" else "overall",
        "–" if row.tau is None else f"{row.tau:.2f}",
        depths or "–",
        f"{row.hf_tokens_per_s:.1f}",
        f"{row.baseline_tokens_per_s:.1f}",
        f"{row.tokens_per_s:.1f}",
        f"{row.speedup_vs_hf:.2f}x",
        f"{row.speedup:.2f}x",
        _share(row.identical),
    ]


def _blocks(report: BenchmarkReport) -> list[tuple[str, list[list[str]]]]:
    """Per drafter, the default one last (where the eye rests): its name and its lines, the overall line last."""
    names = [name for name in report.by_drafter if name != report.default_drafter] + [report.default_drafter]
    several = len({row.suite for row in report.rows}) > 1
    blocks = []
    for name in names:
        lines = []
        for row in report.rows:
            if row.drafter == name:
                line = cells(row)
                lines.append([f"{row.suite}/{line[0]}" if several else line[0], *line[1:]])
        blocks.append((name, [*lines, cells(report.by_drafter[name])]))
    return blocks


def verdict_lines(report: BenchmarkReport) -> list[str]:
    """Identity, spread and warnings in plain words, a line each."""
    row = report.overall
    least, greatest = row.speedup_vs_hf_spread
    lines = [
        f"{report.default_drafter}: {row.tokens_per_s:.1f} tokens/s, {row.speedup_vs_hf:.2f} x HF generate "
        f"({least:.2f} to {greatest:.2f} over {report.repeats} repeats), {row.speedup:.2f} x the plain loop."
    ]
    for identity in (report.plain, *report.identities.values()):
        lines.append(identity.describe() + ".")
        lines += [f"  ERROR {one.describe()}" for one in identity.errors[:3]]
    if any(identity.near_ties for identity in (report.plain, *report.identities.values())):
        lines.append(PLAIN_WORDS)
    return lines + [f"Warning: {text}." for text in report.warnings]


def print_report(report: BenchmarkReport, console: Console) -> None:
    """The tables, one block a drafter, and the verdict lines on a rich console."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    machine = report.machine
    console.print(
        f"{report.target} · draft {report.draft or '–'} · {report.dtype} on {machine.get('processor', report.device)}, "
        f"{report.threads} threads · suite {report.suite}, {report.overall.prompts} prompts x {report.max_new_tokens} "
        f"tokens, {report.repeats} repeats",
        markup=False,
    )
    for name, lines in _blocks(report):
        default = " (default)" if name == report.default_drafter else ""
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0, show_footer=True)
        for index, (column, total) in enumerate(zip(COLUMNS, lines[-1], strict=True)):
            wide = index in (0, 2)  # these fold where a terminal is narrow, numbers never do
            table.add_column(
                HEADINGS[column],
                Text(_short(index, total), style="bold"),
                justify="left" if wide else "right",
                no_wrap=not wide,
                overflow="fold",
            )
        for line in lines[:-1]:
            table.add_row(*(_short(index, cell) for index, cell in enumerate(line)))
        console.print(Text(f"\n{name}{default}", style="bold"))
        console.print(table)
    console.print()
    for text in verdict_lines(report):
        console.print(text, markup=False)


def _short(index: int, cell: str) -> str:
    """Acceptance without leading zeros, so that a table fits 80 columns."""
    return " ".join(part.removeprefix("0") for part in cell.split(" ")) if index == 2 else cell


def write_report(report: BenchmarkReport, folder: str | Path, extra: dict[str, Any] | None = None) -> dict[str, Path]:
    """Write ``report.json``, ``report.md`` and two PNG pictures, each whole or not at all.

    ``extra``: further keys of report.json.

    Returns the paths by kind: ``json``, ``markdown``, ``acceptance``, ``speed``.

    Raises:
        InputError: the folder cannot be written.
    """
    from specheads.evaluation.plots import plot_acceptance, plot_speed

    folder = Path(folder)
    paths = {
        "json": folder / REPORT_FILE,
        "markdown": folder / "report.md",
        "acceptance": folder / "acceptance_by_depth.png",
        "speed": folder / "tokens_per_s.png",
    }
    write_json(paths["json"], {**report.to_json(), **(extra or {})})
    plot_acceptance(report, paths["acceptance"])
    plot_speed(report, paths["speed"])
    write_text(paths["markdown"], markdown(report))
    return paths


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def markdown(report: BenchmarkReport) -> str:
    """The whole report in Markdown."""
    gpu = report.device.startswith("cuda")
    parts = [
        f"# {report.target} with {report.draft or report.default_drafter}\n",
        "\n".join(f"- {line}" for line in verdict_lines(report)) + "\n",
        "## Results\n",
    ]
    for name, lines in _blocks(report):
        default = " (default)" if name == report.default_drafter else ""
        parts += [f"### {name}{default}\n", _table(COLUMNS, [*lines[:-1], [f"**{cell}**" for cell in lines[-1]]])]
    parts += [
        "![acceptance by depth](acceptance_by_depth.png)\n",
        "![tokens per second by category](tokens_per_s.png)\n",
        "## What the columns mean\n",
        MEANINGS,
        "## Where a step's time goes\n",
        *(["On a GPU the host waits in the verification, so the target's run time stands there.\n"] * gpu),
        _table(
            ("drafter", "draft ms", "target ms", "verify and commit ms", "plain target step ms", "nodes", "prefill ms"),
            [_time_cells(name, row) for name, row in report.by_drafter.items()],
        ),
    ]
    parted = [(name, one) for name, row in report.by_drafter.items() for one in row.first_divergences]
    if parted:
        parts += [
            "## Where the tokens part\n",
            "The first place of each prompt. margin: the best logit minus the second best; gap: the best minus the "
            "lower one of the two tokens'; both as the stock model sees the common prefix.\n",
            _table(
                ("drafter", "prompt", "token", "expected", "got", "margin", "gap", "rounding explains", "near tie"),
                [_divergence_cells(name, one) for name, one in parted],
            ),
        ]
    parts += ["## Machine and command\n", "\n".join(f"- {line}" for line in _facts(report)) + "\n"]
    return "\n".join(parts)


def _time_cells(name: str, row: Row) -> list[str]:
    times = (row.draft_ms, row.target_ms, row.verify_ms, row.plain_target_ms, row.nodes_per_step, row.prefill_ms)
    return [name, *(f"{value:.1f}" for value in times)]


def _divergence_cells(name: str, one: dict[str, Any]) -> list[str]:
    numbers = [f"{one[key]:.3g}" for key in ("margin", "gap", "tolerance")]
    ends = [str(one[key]) if one[key] is not None else "(end)" for key in ("expected", "got")]
    return [name, str(one["prompt"]), str(one["position"]), *ends, *numbers, "yes" if one["near_tie"] else "**no**"]


def _facts(report: BenchmarkReport) -> list[str]:
    machine = report.machine
    git = machine.get("git")
    commit = "not from a checkout" if not git else git["commit"] + (" (with changes)" if git["dirty"] else "")
    packages = ", ".join(f"{name} {version}" for name, version in machine.get("packages", {}).items())
    return [
        f"command: `{machine.get('command', '')}`",
        f"commit: {commit}",
        f"machine: {machine.get('processor', '')} ({machine.get('device', '')}), {report.threads} threads of "
        f"{machine.get('cores', '?')} cores, {machine.get('system', '')}",
        f"target: {report.target_line or report.target}; dtype {report.dtype}",
        f"suite: {report.suite}, {report.overall.prompts} prompts, up to {report.max_new_tokens} new tokens, greedy, "
        f"batch 1, {report.repeats} repeats",
        f"versions: Python {machine.get('python', '')}, {packages}",
        f"date: {machine.get('date', '')}",
    ]
