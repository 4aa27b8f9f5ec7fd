"""Methods by epsilon: accuracy, distance from the exact posterior, effective draws.

::

    python -m benchmarks.figure a.json b.json --out efficiency.png --table efficiency.txt
    python -m benchmarks.figure docs/efficiency.md new.json --table tables.txt

Tables are read as well as written: what was measured again takes the place of what a page has.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from replications.dp_hmc_2021 import PAPER_MMD

__all__ = ["draw", "read_tables", "table"]

_COLOURS = {
    "DPLangevin": "#0072B2",
    "laplace": "#56B4E9",
    "DPHMC": "#D55E00",
    "DPPenalty": "#009E73",
    "one-shot": "#000000",
}
_PANELS = (
    ("rmse", "RMSE of the mean (sds)"),
    ("mmd", "MMD"),
    ("ess_per_1000", "effective draws of 1000"),
)


def draw(cells: Sequence[Mapping[str, Any]]) -> Figure:
    """One row of panels for each model; MMD of the published code in grey.

    Parameters
    ----------
    cells : sequence of mapping
        Summaries with ``model``, ``method``, ``epsilon`` and the quantities of the panels.
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
                if points and not (key == "ess_per_1000" and method in ("one-shot", "laplace")):
                    [lines[method]] = panel.plot(*zip(*points, strict=True), "o-", color=colour)
            limit = sorted(
                {(c["epsilon"], c["sigma0"]) for c in cells if c["model"] == model and "rmse" in c}
            )
            if key == "rmse" and limit:
                [lines["limit: noise of an anchor"]] = panel.plot(
                    *zip(*limit, strict=True), ".--", color="0.4"
                )
            if key == "mmd":
                for published in PAPER_MMD.get(model, {}).values():
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


def read_tables(text: str) -> list[dict[str, Any]]:
    """Summaries from tables as :func:`table` writes them."""
    cells: list[dict[str, Any]] = []
    model, repeats = "", 0
    for line in text.splitlines():
        if heading := re.fullmatch(r"\*\*(\w+)\*\*, (\d+) repeats:", line):
            model, repeats = heading[1], int(heading[2])
        entries = [entry.strip() for entry in line.strip("|").split("|")]
        if not model or len(entries) != 9 or not entries[0].isdigit():
            continue
        rmse, sigma0 = re.findall(r"[\d.]+", entries[3])
        ratios = map(float, entries[4].split(", "))
        cells.append(
            {
                "model": model,
                "repeats": repeats,
                "epsilon": float(entries[0]),
                "method": entries[1],
                "forms": entries[2].split(", "),
                "rmse": float(rmse),
                "sigma0": float(sigma0),
                "sd_ratio": dict(zip(("min", "mean", "max"), ratios, strict=True)),
                "coverage": float(entries[5]) if entries[5] else None,
                "mmd": float(entries[6]),
                "ess_per_1000": float(entries[7]),
                "rhat": float(entries[8]),
            }
        )
    return cells


def _read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".md":
        return read_tables(path.read_text())
    return list(json.loads(path.read_text())["cells"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "reports", nargs="+", type=Path, help="JSON of benchmarks.efficiency, or a page of tables"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/figures/efficiency.png"))
    parser.add_argument("--table", type=Path, help="write Markdown tables, too")
    args = parser.parse_args()
    latest: dict[tuple[str, str, float], dict[str, Any]] = {}
    for cell in (cell for path in args.reports for cell in _read(path)):
        latest[cell["model"], cell["method"], float(cell["epsilon"])] = cell
    cells = list(latest.values())
    if args.table:
        args.table.write_text(table(cells))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(cells).savefig(args.out, dpi=150)


if __name__ == "__main__":
    main()
