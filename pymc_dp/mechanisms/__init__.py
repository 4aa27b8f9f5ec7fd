"""The only door to the records: clip, sum in integers, add noise, all of it charged before.

Every answer is a Gaussian mechanism on an integer grid:

1. each unit's contribution is clipped, rounded to the grid and summed in int64
   (:mod:`pymc_dp.clipping`), so two neighbouring data sets give sums that differ by at most
   ``Grid.sensitivity`` units in l2 norm, exactly;
2. a normal variable of standard deviation ``2**m`` units, rounded to an integer without any
   other error, is added (:mod:`pymc_dp.noise`).  ``round(x + N) = x + round(N)`` for an integer x,
   so the answer is a function of the exact Gaussian mechanism's, and (1/tau)-GDP;
3. the answer is scaled back to natural units, which is post-processing.

:class:`Queries` answers the chains, iteration by iteration, and :class:`StatisticQueries` those
that ask for one sum again and again; :class:`Preparation` makes the one-off releases before they
run.
"""

from __future__ import annotations

from pymc_dp.mechanisms.batches import COINS, BatchQueries, MomentQueries
from pymc_dp.mechanisms.fixed import StatisticQueries
from pymc_dp.mechanisms.preparation import Histogram, Preparation, Unpayable
from pymc_dp.mechanisms.queries import Path, Queries

__all__ = [
    "COINS",
    "BatchQueries",
    "Histogram",
    "MomentQueries",
    "Path",
    "Preparation",
    "Queries",
    "StatisticQueries",
    "Unpayable",
]
