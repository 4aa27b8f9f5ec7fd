"""What DPHMC and DPPenalty need before their chains can run: coordinates and a clip norm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pymc_dp.rows.contributions import Score
from pymc_dp.rows.engine import Coordinates
from pymc_dp.warmup.bulk import Gradient, Releases, Structure, find_bulk
from pymc_dp.warmup.langevin import WARM_UP
from pymc_dp.warmup.linear import root
from pymc_dp.warmup.paths import LOOK
from pymc_dp.warmup.prepared import tail_of_scores
from pymc_dp.warmup.quantiles import tail_quantile

__all__ = ["Scaled", "prepare_scaled"]


@dataclass(frozen=True)
class Scaled:
    """Coordinates in which the posterior is about N(0, I), and how long scores are there.

    Attributes
    ----------
    coordinates : Coordinates
    clip_norm : float
        Of scores, and of log-likelihood ratios per unit of distance.
    left : float
        Squared mu that is left for the chains.
    trusted : bool
        False where the budget could not tell the records from the noise: these are the prior's
        coordinates, and a guess.
    """

    coordinates: Coordinates
    clip_norm: float
    left: float
    trusted: bool


def prepare_scaled(
    releases: Releases,
    gradient: Gradient,
    start: Coordinates,
    structure: Structure,
) -> Scaled:
    """The same search as for DPLangevin, and one look at the scores where it ended.

    Parameters
    ----------
    releases, gradient, start, structure
        As for `pymc_dp.warmup.langevin.prepare_langevin`.

    Returns
    -------
    Scaled
    """
    n, d = releases.n_public, len(start.location)
    bulk = find_bulk(releases, gradient, start, structure, share=WARM_UP)
    at = Coordinates(bulk.location, root(np.linalg.inv(bulk.precision)))
    edges, counts, noise_sd = releases.histogram("scores", Score(at), LOOK)
    found = tail_quantile(edges, counts, noise_sd, tail_of_scores(n), n)
    left = (1.0 - bulk.spent - LOOK) * releases.units_mu2
    if not bulk.arrived or not found:
        # scores of a prior's width are about this long if n records add up to its precision
        return Scaled(start, 3.5 * math.sqrt(d / n), left, False)
    return Scaled(at, found, left, True)
