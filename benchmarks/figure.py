"""Methods by epsilon: accuracy, distance from the exact posterior, effective draws.

::

    python -m benchmarks.figure a.json b.json --out efficiency.png --table efficiency.txt
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

__all__ = ["draw", "table"]

_COLOURS = {
    "DPLangevin": "#0072B2",
    "laplace": "#56B4E9",
    "DPHMC": "#D55E00",
    "DPPenalty": "#009E73",
    "one-shot": "#000000",
}
_PANELS = (("rmse", "RMSE of the mean (sds)"), ("mmd", "MMD"), ("ess", "effective draws"))


def draw(cells: Sequence[Mapping[str, Any]], paper: Mapping[str, Any]) -> Figure:
    """One row of panels for each model.

    Parameters
    ----------
    cells : sequence of mapping
        Summaries with ``model``, ``method``, ``epsilon`` and the quantities of the panels.
    paper : mapping
        model -> method -> epsilon -> MMD of the published code, drawn in grey.
    """
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    figure = Figure(figsize=(10.0, 2.7 * len(models) + 0.6), layout="constrained")
    panels = figure.subplots(len(models), len(_PANELS), squeeze=False)
    lines: dict[str, Any] = {}
    for row, model in zip(panels, models, strict=True):
        for panel, (key, label) in zip(row, _PANELS, strict=True):
            for method, colour in _COLOURS.items():
                points = sorted(
                    (cell["epsilon"], cell[key])
                    for cell in cells
                    if (cell["model"], cell["method"]) == (model, method) and key in cell
                )
                if points and not (key == "ess" and method in ("one-shot", "laplace")):
                    [lines[method]] = panel.plot(*zip(*points, strict=True), "o-", color=colour)
            limit = sorted(
                {(c["epsilon"], c["sigma0"]) for c in cells if c["model"] == model and "rmse" in c}
            )
            if key == "rmse" and limit:
                [lines["limit: noise of an anchor"]] = panel.plot(
                    *zip(*limit, strict=True), ".--", color="0.4"
                )
            if key == "mmd":
                for published in paper.get(model, {}).values():
                    points = sorted(published.items())
                    [lines["the paper's four methods"]] = panel.plot(
                        *zip(*points, strict=True), "s:", color="0.65", markersize=4
                    )
            panel.set_xscale("log")
            panel.set_yscale("log")
            panel.set_xlim(0.9, 17.0)
            panel.set_xticks([1, 4, 10, 15], ["1", "4", "10", "15"], minor=False)
            panel.xaxis.set_minor_formatter(NullFormatter())
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter(NullFormatter())
            panel.set_title(f"{model}: {label}", loc="left", fontsize=9)
            panel.set_xlabel("ε", fontsize=9)
            panel.spines[["top", "right"]].set_visible(False)
    handles, labels = list(lines.values()), list(lines)
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


_HEAD = """\
| ε | method | form | RMSE (σ₀) | sd ratios | coverage | MMD | ESS per 1000 | R-hat |
|---|---|---|---|---|---|---|---|---|"""


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if abs(value) < 10.0 else f"{value:.0f}"


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """The same in Markdown, one table for each model."""
    text = []
    for model in dict.fromkeys(cell["model"] for cell in cells):
        rows = [cell for cell in cells if cell["model"] == model and "rmse" in cell]
        text += [f"**{model}**, {rows[0]['repeats']} repeats:", "", _HEAD]
        for cell in sorted(rows, key=lambda c: (c["epsilon"], list(_COLOURS).index(c["method"]))):
            ratios = ", ".join(_short(cell["sd_ratio"][key]) for key in ("min", "mean", "max"))
            entries = [
                f"{cell['epsilon']:g}",
                cell["method"],
                ", ".join(cell["forms"]) if cell["method"] == "DPLangevin" else "",
                f"{_short(cell['rmse'])} ({_short(cell['sigma0'])})",
                ratios,
                _short(cell["coverage"]),
                f"{cell['mmd']:.3f}",
                f"{cell['ess_per_1000']:.0f}",
                _short(cell["rhat"]),
            ]
            text.append("| " + " | ".join(entries) + " |")
        text.append("")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", type=Path, help="JSON of benchmarks.efficiency")
    parser.add_argument("--out", type=Path, default=Path("docs/figures/efficiency.png"))
    parser.add_argument("--table", type=Path, help="write Markdown tables, too")
    args = parser.parse_args()
    cells: list[dict[str, Any]] = []
    for report in (json.loads(path.read_text()) for path in args.reports):
        cells += report["cells"]
        paper = report["paper_mmd"]
    if args.table:
        args.table.write_text(table(cells))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # JSON has no numbers for keys
    numbers = {
        model: {
            method: {float(epsilon): value for epsilon, value in row.items()}
            for method, row in rows.items()
        }
        for model, rows in paper.items()
    }
    draw(cells, numbers).savefig(args.out, dpi=150)


if __name__ == "__main__":
    main()
