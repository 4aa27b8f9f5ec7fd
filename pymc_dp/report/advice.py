"""Which clip norm would be about right, from the prior predictive distribution alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
from pymc.model import Model

from pymc_dp.base.checks import check_integer
from pymc_dp.budget import get_budget
from pymc_dp.publication.results import unconstrain
from pymc_dp.records import extract, longest_unnamed, private_observed
from pymc_dp.report.simulation import MODE, ROWS, Features, draw_prior, simulator
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import RowFunctions
from pymc_dp.rows.interfaces import Coordinates
from pymc_dp.rows.store import RecordStore, RowGroup
from pymc_dp.steps.settings import scaling_matrix

#: With 200 draws of 100 records there are 100 above the quantile of 99.5 %.
_QUANTILES = (0.5, 0.9, 0.99, 0.995, 0.999)


@dataclass(frozen=True)
class ClipAdvice:
    """How long score vectors are under the prior predictive distribution.

    Attributes
    ----------
    clip_norm : float
        The norm that 0.5 % of the simulated records exceed.
    quantiles : dict of float to float
        Norms of the score vectors of simulated records, in z.
    draws : int
        Draws of the parameters that were used.
    """

    clip_norm: float
    quantiles: dict[float, float]
    draws: int

    def __repr__(self) -> str:
        norms = ", ".join(f"{100 * q:g} %: {norm:.3g}" for q, norm in self.quantiles.items())
        return (
            f"clip_norm = {self.clip_norm:.3g}\n"
            f"Norms of score vectors in z at {self.draws} draws from the prior, of records "
            f"simulated there: {norms}.\n"
            "From the model and public features alone; no private record was read. Where the prior "
            "is wide, most of it is far from the posterior and this is more than is needed."
        )


def clip_advice(
    model: Model | None = None,
    *,
    scaling: Any,
    data: Mapping[str, Any] | None = None,
    draws: int = 200,
    random_seed: int | None = None,
) -> ClipAdvice:
    """Clip norms that would be about right if the prior were, without touching the data.

    Parameters are drawn from the prior, observed variables given these and public features, and
    the score vectors of these simulated records are measured at the parameters that made them.

    Parameters
    ----------
    model : pymc.Model, optional
        Default: the model of the context.
    scaling : float, array or dict
        As the private step will have it: norms are in its coordinates z.
    data : mapping of str to array, optional
        Public examples of features by name of their ``pm.Data``, records on the first axis: rows
        are drawn from them.  Any number of rows; arrays of equal length keep theirs together.
        Features without an example are drawn uniformly within their :func:`pymc_dp.bounds`;
        labels of groups uniformly from all groups; public data are used as they are.
    draws : int, default 200
        Draws of the parameters, with 100 records each.
    random_seed : int, optional

    Returns
    -------
    ClipAdvice

    Raises
    ------
    UnsafeModel
        If features are private, and neither an example nor bounds are given.
    ValueError
        If `data` has an unknown name or other columns, or the model cannot be simulated.

    Notes
    -----
    *Guarantee.*  A function of the model, the public arguments and the shapes of a row: no value
    of a private array is read, nor their number of rows.  Nothing is charged.

    *Assumptions.*  `data` are public.

    *Weaknesses.*  A unit of k rows has a score of up to k times the norm of one row.  It says
    nothing about records that the model does not expect.
    """
    norms = score_norms(model, scaling=scaling, data=data, draws=draws, random_seed=random_seed)
    values = np.quantile(np.concatenate(norms), _QUANTILES)
    quantiles = {q: float(value) for q, value in zip(_QUANTILES, values, strict=True)}
    return ClipAdvice(quantiles[0.995], quantiles, len(norms))


def score_norms(
    model: Model | None,
    *,
    scaling: Any,
    data: Mapping[str, Any] | None,
    draws: int,
    random_seed: int | None,
) -> list[np.ndarray]:
    """Norms of the scores of simulated records, one array for each draw from the prior.

    Arguments, errors and guarantee are those of :func:`clip_advice`.
    """
    draws = check_integer("draws", draws, minimum=10)
    model = pm.modelcontext(model)
    budget = get_budget(model)
    public = () if budget is None else budget.public
    secrecy = {} if budget is None else budget.secrecy
    records = extract(model, **secrecy, check=False, read=False)
    matrix = scaling_matrix(scaling, records.parameters, model)
    rng = np.random.default_rng(random_seed)
    features = Features(model, records, public, dict(data or {}))
    length = longest_unnamed(records.n_units, None) if budget is None else budget.longest_unnamed
    simulators = [
        simulator(model, rv, features, public, length, rng)
        for rv in private_observed(model, public)
    ]
    names = [rv.name for rv in model.free_RVs]
    prior = draw_prior(model, draws, rng)
    theta = unconstrain(model, records.parameters, prior)[0]
    groups = [
        (group.graph.leaves, RowFunctions(group.graph, records.parameters, {"mode": MODE}))
        for group in records.groups
    ]
    norms = []
    for k in range(draws):
        if not np.isfinite(theta[k]).all():  # rounded to the boundary of its support
            continue
        known = {name: prior[name].values[0, k] for name in names}
        arrays = features.draw(rng)
        for simulate in simulators:
            simulate(known, arrays)
        engine = RowEngine(
            [
                RowGroup(functions, RecordStore([arrays[leaf.source] for leaf in leaves]), None)
                for leaves, functions in groups
            ],
            records.parameters,
            ROWS,
            Coordinates(theta[k], matrix),
        )
        scores = engine.scores(np.zeros(records.parameters.size))
        blocks = [np.linalg.norm(block, axis=0) for _, block in engine.vectors(scores)]
        norms.append(np.concatenate(blocks))
    if not norms:
        raise ValueError("No draw of the prior is inside of its support; choose another prior.")
    return norms
