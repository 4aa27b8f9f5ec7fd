"""Cost of one pass over the records by number of records and of parameters.

::

    python -m benchmarks.scaling --quick
    python -m benchmarks.scaling --json scaling.json --figure docs/figures/scaling.png
    python -m benchmarks.scaling --from scaling.json --figure docs/figures/scaling.png

A pass is the clipped, rounded sum of all score vectors of a logistic regression, as in one kick of
DPLangevin, without the noise: ours from the PyMC model, and the same written by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.engine import private_engine, private_sum
from benchmarks.hand import logistic_case
from benchmarks.machine import description
from pymc_dp.base import threads
from pymc_dp.rows.predicted import PredictorEngine
from pymc_dp.rows.predictor import recognise

__all__ = ["draw", "measure"]

ROWS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
PARAMETERS = (2, 5, 10, 20, 50, 100, 200)
#: Number of records where parameters vary, and of parameters where records do.
N, D = 100_000, 10
_LABELS = {
    "ours": "from the PyMC model",
    "ours_threads": "the same, all processors",
    "numba": "by hand, Numba",
    "numpy": "by hand, NumPy",
}
_COLOURS = {"ours": "#D55E00", "ours_threads": "#E69F00", "numba": "#0072B2", "numpy": "#56B4E9"}


def measure(n: int, d: int, seconds: float) -> dict[str, Any]:
    """Median milliseconds of a pass, alternating between the rivals for so many seconds."""
    case = logistic_case(d, n)
    engine = private_engine(case)
    predictor, reason = recognise(engine)
    if predictor is None:
        raise SystemExit(reason)
    bound = 3.0 * float(np.sqrt(d))
    ours = PredictorEngine(engine, predictor)
    rivals: dict[str, Callable[[], Any]] = {
        "ours": lambda: _with_threads(1, lambda: private_sum(ours, case.theta, bound)),
        "ours_threads": lambda: _with_threads(
            os.cpu_count() or 1, lambda: private_sum(ours, case.theta, bound)
        ),
    }
    for kind, call in case.gradients.items():
        rivals[kind] = lambda call=call: call(case.theta, bound)
    times: dict[str, list[float]] = {kind: [] for kind in rivals}
    for call in rivals.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["ours"]) < 3:
        for kind, call in rivals.items():
            begin = time.perf_counter()
            call()
            times[kind].append(1e3 * (time.perf_counter() - begin))
    return {"n": n, "d": d, **{kind: float(np.median(t)) for kind, t in times.items()}}


def _with_threads(most: int, call: Callable[[], Any]) -> Any:
    before = threads.count
    threads.count = lambda: most
    try:
        return call()
    finally:
        threads.count = before


def draw(cells: Sequence[Mapping[str, Any]]) -> Figure:
    """Two log-log panels: by number of records, and by number of parameters."""
    figure = Figure(figsize=(10.0, 4.0), layout="constrained")
    panels = figure.subplots(1, 2)
    kinds = [
        ("n", "records", f"{D} parameters", [c for c in cells if c["d"] == D]),
        ("d", "parameters", f"{N:,} records", [c for c in cells if c["n"] == N]),
    ]
    for panel, (key, label, title, chosen) in zip(panels, kinds, strict=True):
        points = sorted(chosen, key=lambda cell: cell[key])
        for kind, name in _LABELS.items():
            panel.loglog(
                [cell[key] for cell in points],
                [cell[kind] for cell in points],
                "o-",
                color=_COLOURS[kind],
                label=name,
                markersize=4,
            )
        panel.set(xlabel=label, ylabel="milliseconds per pass", title=title)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
            axis.set_minor_formatter(NullFormatter())
        low, high = panel.get_ylim()
        if high < 100 * low:  # one decade alone would be labelled
            panel.set_yticks([1, 2, 5, 10, 20, 50, 100])
            panel.set_ylim(low, high)
        panel.grid(alpha=0.3, which="both", linewidth=0.5)
    panels[0].legend(frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 100,000 records, 50 parameters")
    parser.add_argument("--seconds", type=float, default=4.0, help="per point")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--from", dest="source", type=Path, help="draw what was measured before")
    args = parser.parse_args()
    if args.source is not None:
        found = json.loads(args.source.read_text())
    else:
        points = [(n, D) for n in ROWS] + [(N, d) for d in PARAMETERS if d != D]
        if args.quick:
            points = [(n, d) for n, d in points if n <= 100_000 and d <= 50]
        found = {"machine": description(), "cells": []}
        print(found["machine"])
        print(f"{'records':>12s}{'parameters':>12s}" + "".join(f"{k:>14s}" for k in _LABELS))
        for n, d in points:
            cell = measure(n, d, 0.5 if args.quick else args.seconds)
            found["cells"].append(cell)
            times = "".join(f"{cell[kind]:14.3f}" for kind in _LABELS)
            print(f"{n:12,d}{d:12d}{times}", flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(found, indent=1))
    if args.figure is not None:
        draw(found["cells"]).savefig(args.figure, dpi=150)


if __name__ == "__main__":
    main()
