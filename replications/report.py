"""What a replication found: the paper's number, ours, and why they differ."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.machine import description

__all__ = ["RESULTS", "Found", "Row", "load", "mean_and_error"]

#: Results of full runs, which the documentation reads.
RESULTS = Path(__file__).parent / "results"
#: A list of numbers, which takes one line.
_LIST = re.compile(r"\[[^\[\]{}\"]*\]")


@dataclass(frozen=True)
class Row:
    """One number of a paper.

    Attributes
    ----------
    where : str
        Table or figure, and panel.
    what : str
        Quantity and setting.
    paper : float or None
        As printed, or read off a figure (`why` says so); None where the paper has no number.
    ours : float
    error : float or None
        Standard error of `ours` over repeats.
    why : str
        Why the two differ, if they do.
    """

    where: str
    what: str
    paper: float | None
    ours: float
    error: float | None = None
    why: str = ""


@dataclass
class Found:
    """Rows, and series for pictures: ``series[figure][curve]`` is a list of numbers."""

    rows: list[Row] = field(default_factory=list)
    series: dict[str, dict[str, Any]] = field(default_factory=dict)

    def table(self) -> pd.DataFrame:
        """One line for each number, with the ratio of ours to the paper's."""
        return pd.DataFrame(
            [
                {
                    "where": row.where,
                    "what": row.what,
                    "paper": math.nan if row.paper is None else row.paper,
                    "ours": row.ours,
                    "± (1 se)": math.nan if row.error is None else row.error,
                    "ratio": row.ours / row.paper if row.paper else math.nan,
                    "why": row.why,
                }
                for row in self.rows
            ]
        )

    def write(self, path: Path, paper: str, facts: Mapping[str, Any]) -> None:
        """Keep as JSON, with the machine."""
        cells = {
            "paper": paper,
            "machine": description(),
            **facts,
            "rows": [asdict(row) for row in self.rows],
            "series": self.series,
        }
        text = _LIST.sub(lambda found: " ".join(found[0].split()), json.dumps(cells, indent=1))
        path.write_text(text + "\n", encoding="utf-8")


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean over repeats and, of several, its standard error."""
    mean, k = float(np.mean(values)), len(values)
    return mean, float(np.std(values, ddof=1) / math.sqrt(k)) if k > 1 else None


def load(paper: str) -> Found:
    """What the full run of a paper found when it was last made."""
    cells = json.loads((RESULTS / f"{paper}.json").read_text(encoding="utf-8"))
    return Found(_rows(cells["rows"]), cells["series"])


def _rows(cells: Iterable[Mapping[str, Any]]) -> list[Row]:
    return [Row(**cell) for cell in cells]
