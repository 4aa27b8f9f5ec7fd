"""What DPLangevin needs before its chains can run, and which form they have.

Released once, in the parent process: the bulk, the norms of scores and of their changes, the
anchored score and the size of energy errors.  What is left of the budget pays for the chains.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from pymc_dp.base.matrices import Coordinates, root
from pymc_dp.rows.contributions import Change, Score, law_unknown
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.predicted import PredictorEngine
from pymc_dp.rows.predictor import recognise
from pymc_dp.tuning.bulk import find_bulk, scaling_of
from pymc_dp.tuning.effects import InEffects, effects_of
from pymc_dp.tuning.forecast import LEAST, WIDE, WORTH
from pymc_dp.tuning.forms import LOOK, Anchored, Form, Plain
from pymc_dp.tuning.model_parts import Density, Public, compile_rows, piecewise_linear
from pymc_dp.tuning.preparing import Preparing, can_pay
from pymc_dp.tuning.quadratic import PriorOnly, Quadratic
from pymc_dp.tuning.releases import Clipping, Shares, harmless_tail, tail_of_scores

FORMS: dict[str, type[Form]] = {form.form: form for form in (Anchored, Plain, Quadratic)}
"""The forms, as users name them."""

LONG_LOOK = 0.1  # largest part for the look at the scores: a bound that is too long costs more
KICKS = (0.02, 0.25)  # least and largest part for the changes of scores of anchored chains
WANTED = 800.0  # effective draws that these should be worth, over all chains
FEWEST = 20.0  # the same where the alternative is a normal approximation of what is not normal
REACH = 2.5  # how far the effect of one group goes, in its sds
NONLINEAR = 0.2  # where scores change by more than this part of themselves, an anchor saves nothing


def prepare_langevin(
    budget: Shares,
    density: Density,
    start: Coordinates,
    *,
    paths: int,
    sensitivity: float,
    form: str | None = None,
    step_size: float | None = None,
    n_steps: int | None = None,
    flat: bool = False,
    counts: bool = False,
    consistent: bool = False,
) -> Form:
    """Everything that the chains of DPLangevin need.

    First arguments, `flat` and `counts` as for `find_bulk`; `paths` are the iterations of all
    chains and runs. `sensitivity` is that of a sum of vectors clipped to norm 1: 2 if records are
    replaced, else 1. `consistent`: what clipping takes is given back, as the law of outcomes is
    known.
    """
    structure = budget.structure
    public = Public(density, structure, start)
    n, d, total = budget.n, len(start.location), budget.total
    relative = sensitivity / math.sqrt(0.7 * total)  # about, of the anchor: noise by clip norm
    price = d * relative**2 if consistent else None  # of sums in z, whose entries have variance 1
    bulk = find_bulk(
        budget,
        public,
        start,
        flat=flat,
        counts=counts,
        price=price and 0.7 * price,
    )
    scaling = scaling_of(bulk.precision, bulk.location, structure, n)
    clip = Coordinates(bulk.location, scaling)
    basis = np.linalg.solve(clip.scaling, root(np.linalg.inv(bulk.precision)))
    stretch = float(np.linalg.norm(basis, 2))  # of noise, from z to w
    rng = np.random.default_rng(0)  # public: places at which norms are looked at
    # equally far on every axis, so that the force of a small group is not clipped
    away = rng.choice([-1.0, 1.0], d) * (1.0 + 1.5 / math.sqrt(d))
    if not (consistent and bulk.arrived and budget.laws_found(clip)):
        price = None
    # the noise of the histogram hides no more of the tail than may be clipped
    look = float(np.clip(28.0 / (tail_of_scores(n) * n) ** 2 / total, LOOK, LONG_LOOK))
    found = budget.clipping(Score(clip), harmless_tail(n, relative), price, look)
    whole, clipping = found or (Clipping(0.0), Clipping(0.0))
    blank = Form(
        clip=clip,
        basis=basis,
        score=np.zeros(d),
        covariance=np.zeros((d, d)),
        curvature=np.zeros((d, d)),
        clipping=clipping,
        step_size=step_size or 0.4,
        n_steps=n_steps or 4,
    )
    if not (bulk.arrived and found):
        return PriorOnly.instead_of(blank, start)
    moved = budget.heavy_tail("changes", Change(clip, basis @ away), 0.002, LOOK)
    change: float = 1.1 * moved if moved else clipping.bound

    def worth(share: float) -> float:
        """Effective draws that residual scores with a share of the budget are worth."""
        return WORTH * share * total / (sensitivity * change * stretch) ** 2

    def kicks_wanted() -> float:
        """Share of the changes of scores."""
        return min(max(KICKS[0], WANTED / worth(1.0)), KICKS[1] * (1.0 - budget.spent))

    left = 1.0 - budget.spent
    kicks = kicks_wanted()
    unanchored = WORTH * 0.85 * left * total / (sensitivity * whole.bound * stretch) ** 2
    # sd of the anchor's noise
    spread = sensitivity * clipping.bound * stretch / math.sqrt(0.8 * left * total)
    if form is None and not (bulk.known and can_pay(paths, total)):
        form = "quadratic"  # which does without a curvature of which noise hides a part
    elif form is None:
        affordable = spread < WIDE and worth(kicks) > LEAST
        if (flat or change > NONLINEAR * whole.bound) and unanchored > FEWEST:
            form = "plain"
        elif flat:  # few records change their score, by all of it: clipping would hide them
            form = "quadratic"
        else:
            form = "anchored" if affordable else "quadratic"

    known = bulk.data_precision
    if form == "quadratic":
        normal = Quadratic.prepare(blank, budget, public, known, bulk.unsure, flat)
        return normal or PriorOnly.instead_of(blank, start)
    if form == "plain":
        blank = replace(blank, clipping=whole)
        return Plain.prepare(blank, budget, paths, sensitivity, step_size, n_steps, rng)
    blocks, _ = structure.effects(bulk.location)
    if blocks:  # the score of a record changes as far as its group goes
        widest = np.zeros(d)
        for block in blocks:
            widest[block] = REACH * np.linalg.norm(basis[block], axis=1)
        farthest = budget.tail("changes of groups", Change(clip, widest), 0.0005, LOOK)
        change = max(change, farthest or 0.0)
        kicks = kicks_wanted()
    ready = replace(blank, effective_draws=worth(kicks))
    return Anchored.prepare(
        ready, budget, change, kicks, public, known, paths, sensitivity, step_size
    )


def learn_form(
    preparing: Preparing,
    *,
    form: str | None = None,
    consistent_clipping: bool | None = None,
    step_size: float | None = None,
    n_steps: int | None = None,
) -> tuple[Form, RowEngine]:
    """The private preparation of DPLangevin, consistently clipped where that is possible.

    Without `form`, where the shared values of the likelihood are non-linear in the parameters,
    records are asked about these values. The second result has the records in the coordinates of
    clipping. ValueError if consistent clipping is asked for and not available.
    """
    parts = preparing.parts
    density: Density = parts.terms
    records, start, effects = parts.engine, parts.start, None
    predictor, _ = recognise(records, parts.compile_kwargs)
    if form is None and predictor is None:  # a linear predictor is linear in the parameters
        effects = effects_of(parts.records, records, parts.prior_draws, parts.compile_kwargs)
    if effects is not None:
        form, records, density, start = "quadratic", effects.engine, effects, effects.start
        predictor, _ = recognise(records, parts.compile_kwargs)
    compile_rows(records, preparing.progressbar)
    flat = piecewise_linear(records)
    unknown = law_unknown(records)
    if consistent_clipping and unknown:
        raise ValueError(f"consistent_clipping=True is not available: {unknown}")
    consistent = not unknown and consistent_clipping is not False
    engine = records if predictor is None else PredictorEngine(records, predictor)
    options: dict[str, Any] = {
        "form": form,
        "consistent": consistent,
        "step_size": step_size,
        "n_steps": n_steps,
    }

    def ask(budget: Shares) -> Form:
        budget.releases.engine = engine
        return prepare_langevin(
            budget,
            density,
            start,
            paths=preparing.paths,
            sensitivity=parts.budget.sensitivity,
            flat=flat,
            counts=predictor is not None and predictor.counts,
            **options,
        )

    settings = {**options, "effects": effects is not None}
    found = preparing.prepared(ask, settings, records)
    if found.trusted and found.clipping.heavy_tails:
        preparing.warn_heavy()
    if not found.trusted:
        preparing.warn_untrusted()
    if effects is not None:
        if not found.trusted:
            return PriorOnly.instead_of(found, parts.start), parts.engine
        found = found.become(InEffects, effects=effects)
    engine = engine.with_coordinates(found.clip)
    if found.asks:
        preparing.tell_threads(engine)
    return found, engine
