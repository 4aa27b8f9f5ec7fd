"""What DPLangevin needs before its chains can run: coordinates, bounds, the anchored score.

These are released once, in the parent process: where the bulk is (`find_bulk`), how long score
vectors and their changes are, the anchored score itself, and the size of energy errors. What is
left of the budget pays for the chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pymc_dp.base.matrices import root
from pymc_dp.rows.contributions import Change, Score
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.tuning.anchored import anchored
from pymc_dp.tuning.answers import Releases, Structure
from pymc_dp.tuning.bulk import find_bulk, scaling_of
from pymc_dp.tuning.paths import LOOK, can_pay
from pymc_dp.tuning.plain import plain
from pymc_dp.tuning.prepared import (
    WORTH,
    Clipping,
    Form,
    Prepared,
    Shares,
    harmless_tail,
    tail_of_scores,
)
from pymc_dp.tuning.public import Density, Public
from pymc_dp.tuning.quadratic import quadratic

#: Part of the budget for the search for the bulk.
WARM_UP = 0.12
#: Largest part for the look at the scores: a bound that is too long costs more.
LONG_LOOK = 0.1
#: A bound that nothing passes is used if it is longer than the learned one by no more than this,
#: or if what it adds to the noise is less than half of this in posterior sds.
WORTH_IT = 0.2
#: Least and largest part for the changes of scores that anchored chains ask for.
KICKS = (0.02, 0.25)
#: Effective draws that these are to be worth, over all chains.
WANTED = 800.0
#: Fewer effective draws are not worth a chain that touches records.
LEAST = 200.0
#: The same where the alternative is a normal approximation of what is not normal.
FEWEST = 20.0
#: With more noise than this, in posterior sds, the noise shapes what is published.
WIDE = 0.6
#: How far a group's effect goes, in its sds: alone it is not held back by a norm of all.
REACH = 2.5
#: Where scores change by more than this part of themselves, an anchor saves nothing.
NONLINEAR = 0.2


def _look(n: int, total: float) -> float:
    """Share of a histogram whose noise hides no more of the tail than may be clipped."""
    return float(np.clip(28.0 / (tail_of_scores(n) * n) ** 2 / total, LOOK, LONG_LOOK))


def prepare_langevin(
    releases: Releases,
    density: Density,
    start: Coordinates,
    structure: Structure,
    *,
    paths: int,
    sensitivity: float,
    form: Form | None = None,
    step_size: float | None = None,
    n_steps: int | None = None,
    limit: Callable[[Coordinates], float | None] = lambda at: None,
    flat: bool = False,
    counts: bool = False,
    consistent: bool = False,
) -> Prepared:
    """Everything that the chains of DPLangevin need.

    Parameters
    ----------
    density : Density
        Public log density, in theta.
    start : Coordinates
        Location and standard deviations of the prior.
    structure, flat, counts
        As for `find_bulk`.
    paths : int
        Iterations of all chains and runs together.
    sensitivity : float
        Of a sum of vectors clipped to norm 1: 2 if records are replaced, else 1.
    form : {"anchored", "plain", "quadratic"}, optional
        Default: the one that makes most of the budget.
    step_size, n_steps : optional
        Of the chains; by default chosen here.
    limit : callable
        Clip coordinates -> a bound that no record's score at the origin can pass, where one follows
        from declared bounds.
    consistent : bool
        The law of outcomes is known, and what clipping takes from scores is given back.
    """
    public = Public(density, structure, start)
    n, d, total = releases.n_public, len(start.location), releases.units_mu2
    relative = sensitivity / math.sqrt(0.7 * total)  # about, of the anchor: noise by clip norm
    price = d * relative**2 if consistent else None  # of sums in z, whose entries have variance 1
    bulk = find_bulk(
        releases,
        public,
        start,
        structure,
        share=WARM_UP,
        flat=flat,
        counts=counts,
        price=price and 0.7 * price,
    )
    budget = Shares(releases, structure, bulk.spent)
    scaling = scaling_of(bulk.precision, bulk.location, structure, n)
    clip = Coordinates(bulk.location, scaling)
    basis = np.linalg.solve(clip.scaling, root(np.linalg.inv(bulk.precision)))
    stretch = float(np.linalg.norm(basis, 2))  # of noise, from z to w
    rng = np.random.default_rng(0)  # public: places at which norms are looked at
    # as far on every axis: had it been near on that of a small group, its force would be clipped
    away = rng.choice([-1.0, 1.0], d) * (1.0 + 1.5 / math.sqrt(d))
    noise = relative * 3.5 * math.sqrt(d / n)  # in posterior sds
    if not (consistent and bulk.arrived and budget.laws_found(clip)):
        price = None
    found = budget.clipping(Score(clip), harmless_tail(n, relative), price, _look(n, total))
    whole, clipping = found or (Clipping(0.0), Clipping(0.0))
    rigorous = limit(clip)
    longest = 1.0 + max(WORTH_IT, WORTH_IT / (2.0 * noise))
    if found and rigorous is not None and rigorous < longest * clipping.bound:
        whole = clipping = Clipping(rigorous)
    blank = Prepared(
        form="quadratic",
        clip=clip,
        basis=basis,
        score=np.zeros(d),
        covariance=np.zeros((d, d)),
        curvature=np.zeros((d, d)),
        clip_norms={},
        shares={},
        step_size=step_size or 0.4,
        n_steps=n_steps or 4,
        friction=0.3,
        persistent=False,
        effective_draws=math.inf,
        clipping=clipping,
        trusted=bulk.arrived and found is not None,
    )
    if not blank.trusted:
        return prior_only(blank, start)
    moved = budget.heavy_tail("changes", Change(clip, basis @ away), 0.002, LOOK)
    change: float = 1.1 * moved if moved else clipping.bound

    def worth(share: float) -> float:
        """Effective draws that residual scores with a share of the budget are worth."""
        return WORTH * share * total / (sensitivity * change * stretch) ** 2

    def kicks_wanted() -> float:
        """Share of the chains' changes of scores."""
        return min(max(KICKS[0], WANTED / worth(1.0)), KICKS[1] * (1.0 - budget.spent))

    left = 1.0 - budget.spent
    kicks = kicks_wanted()
    unanchored = WORTH * 0.85 * left * total / (sensitivity * whole.bound * stretch) ** 2
    # sd of the anchor's noise
    spread = sensitivity * clipping.bound * stretch / math.sqrt(0.8 * left * total)
    if form is None and not (bulk.known and can_pay(paths, total)):
        form = "quadratic"  # what noise hides of the curvature is left to the prior
    elif form is None:
        affordable = spread < WIDE and worth(kicks) > LEAST
        if (flat or change > NONLINEAR * whole.bound) and unanchored > FEWEST:
            form = "plain"
        elif flat:  # few records change their score, by all of it: clipping would hide them
            form = "quadratic"
        else:
            form = "anchored" if affordable else "quadratic"

    if form == "quadratic":
        normal = quadratic(blank, budget, public, bulk.data_precision, flat)
        return normal if normal.trusted else prior_only(blank, start)
    if form == "plain":
        blank = replace(blank, clipping=whole)
        return plain(blank, budget, paths, sensitivity, step_size, n_steps, rng)
    blocks, _ = structure.effects(bulk.location)
    if blocks:  # the score of a record changes as far as its group goes
        widest = np.zeros(d)
        for block in blocks:
            widest[block] = REACH * np.linalg.norm(basis[block], axis=1)
        farthest = budget.tail("changes of groups", Change(clip, widest), 0.0005, LOOK)
        change = max(change, farthest or 0.0)
        kicks = kicks_wanted()
    ready = replace(blank, effective_draws=worth(kicks))
    known = bulk.data_precision
    return anchored(ready, budget, change, kicks, public, known, paths, sensitivity, step_size)


def prior_only(found: Prepared, start: Coordinates) -> Prepared:
    """The result where nothing could be learned: the prior, marked as not trusted."""
    d = len(start.location)
    return replace(
        found,
        form="quadratic",
        clip=start,
        basis=np.eye(d),
        score=np.zeros(d),
        covariance=np.zeros((d, d)),
        curvature=np.zeros((d, d)),
        trusted=False,
    )
