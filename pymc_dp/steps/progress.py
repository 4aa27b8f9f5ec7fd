"""One-off releases with a progress bar."""

from __future__ import annotations

from types import TracebackType

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pymc_dp.privacy.preparation import Histogram, Preparation
from pymc_dp.rows.contributions import Contribution
from pymc_dp.rows.engine import Engine


class Shown:
    """A preparation whose releases are shown as they are made; a context manager."""

    def __init__(self, preparation: Preparation, progressbar: bool) -> None:
        self.preparation = preparation
        self._bar = Progress(
            TextColumn("Private preparation"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} % of the budget"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            disable=not progressbar,
        )
        self._task = self._bar.add_task("", total=1.0)

    def __enter__(self) -> Shown:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    @property
    def n_public(self) -> int:
        """Public number of units."""
        return self.preparation.n_public

    @property
    def units_mu2(self) -> float:
        """Squared mu of which shares are parts."""
        return self.preparation.units_mu2

    def ask(self, engine: Engine) -> None:
        """Ask about another view of the same records from now on."""
        self.preparation.engine = engine

    def histogram(self, label: str, spec: Contribution, share: float) -> Histogram:
        """As `Preparation.histogram`."""
        self._bar.update(self._task, description=label)
        answer = self.preparation.histogram(label, spec, share)
        self._bar.advance(self._task, share)
        return answer

    def vector_sum(
        self, label: str, spec: Contribution, clip_norm: float, share: float
    ) -> tuple[np.ndarray, float]:
        """As `Preparation.vector_sum`."""
        self._bar.update(self._task, description=label)
        answer = self.preparation.vector_sum(label, spec, clip_norm, share)
        self._bar.advance(self._task, share)
        return answer
