"""How many records a clip norm clips: of simulated records, or bought as a noisy count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pymc as pm
from pymc.model import Model

from pymc_dp.base.checks import check_epsilon, check_integer, check_positive
from pymc_dp.base.matrices import Coordinates
from pymc_dp.budget import check_model, get_budget
from pymc_dp.privacy.accounting import mu_from_budget, units_from_mu
from pymc_dp.privacy.answer import EDGES
from pymc_dp.privacy.preparation import Preparation
from pymc_dp.publication.results import PYTHON, unconstrain
from pymc_dp.records.extraction import Records, extract
from pymc_dp.records.units import RecordStore, longest_unnamed
from pymc_dp.reports import COLOURS, LIMIT, axes_for, log_x_axis, tidy
from pymc_dp.reports.diagnostics import numbers
from pymc_dp.reports.simulation import ROWS, Simulation, drawn_from_prior
from pymc_dp.rows.contributions import Score
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import RowFunctions
from pymc_dp.rows.groups import RowGroup
from pymc_dp.steps.settings import scaling_matrix

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# -- the clip norm that is about right for simulated records --------------------------------------


_QUANTILES = (0.5, 0.9, 0.99, 0.995, 0.999)  # 100 records of 20,000 are above the quantile of 0.995


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
    """Clip norms that are about right if the prior is, without touching the data.

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
    """Norms of the scores of simulated records, an array per draw; see `clip_advice`."""
    draws = check_integer("draws", draws, minimum=10)
    model = pm.modelcontext(model)
    budget = get_budget(model)
    public = () if budget is None else budget.public
    secrecy = {} if budget is None else budget.secrecy
    records = extract(model, **secrecy, check=False, read=False)
    matrix = scaling_matrix(scaling, records.parameters, model)
    rng = np.random.default_rng(random_seed)
    length = longest_unnamed(records.n_units, None) if budget is None else budget.longest_unnamed
    simulation = Simulation(model, records, public, length, data or {}, rng)
    seed = int(rng.integers(2**31))
    drawn = drawn_from_prior(model, draws, seed)
    prior = {rv.name: values[None] for rv, values in zip(model.free_RVs, drawn, strict=True)}
    theta = unconstrain(model, records.parameters, prior)[0]
    groups = [
        (group.graph.leaves, RowFunctions(group.graph, records.parameters, {"mode": PYTHON}))
        for group in records.groups
    ]
    norms = []
    for k in range(draws):
        if not np.isfinite(theta[k]).all():  # rounded to the boundary of its support
            continue
        arrays = simulation.draw([values[k] for values in drawn])
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


# -- how many records are clipped -----------------------------------------------------------------


def clipping_report(
    model: Model | None = None,
    *,
    scaling: Any,
    clip_norm: float | Sequence[float],
    data: Mapping[str, Any] | None = None,
    draws: int = 200,
    random_seed: int | None = None,
    epsilon: float | None = None,
    at: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """Share of records whose score would be clipped: simulated, or bought as a noisy count.

    Parameters
    ----------
    model : pymc.Model, optional
        Default: the model of the context.
    scaling : float, array or dict
        As the private step will have it: norms are in its coordinates z.
    clip_norm : float or sequence of float
        Bounds to report on; public.
    data, draws, random_seed
        Of the simulation, as in :func:`pymc_dp.clip_advice`.
    epsilon : float, optional
        Buy the count for the private records, for so much at the budget's delta if nothing else
        were released.  Default: simulate, and spend nothing.
    at : mapping of str to array, optional
        With `epsilon`: value of each free variable at which the scores are taken; public, or
        released, such as posterior means.  Default: the initial point of the model.

    Returns
    -------
    pandas.DataFrame
        One row for each clip norm.  ``clipped`` is the share of records above it.  Simulated:
        ``worst``, the largest such share of a draw of the parameters, and ``kept``, the sum of the
        clipped norms over that of all.  Bought: ``noise_sd`` of ``clipped``, which may be negative.

    Raises
    ------
    BudgetExceeded
        If the budget does not allow `epsilon`; no record was read.
    UnsafeModel
        If the model cannot be simulated without private features, or not be asked about records.
    ValueError
        If an argument is out of its range, or `epsilon` is given and the model has no budget.

    Notes
    -----
    *Guarantee.*  Without `epsilon`, a function of the model, the public arguments and the shapes of
    a row; nothing is charged.  With `epsilon`, each clip norm is one Gaussian release, charged
    before a record is read and shown in ``budget.table()``: a histogram with noise, of which the
    last bin counts the units whose score is at least `clip_norm`.

    *Assumptions.*  `clip_norm`, `scaling`, `data` and `at` are public or were released.

    *Weaknesses.*  Simulated records are what the model and its prior expect: where the prior is
    wide, most draws are far from the posterior and more is clipped there than in a run.  A bought
    count is about one point only.  A small share does not prove a small bias: for ``DPPenalty``,
    0.5 % of skewed records can move a posterior mean by one standard deviation.
    """
    norms = np.array([check_positive("clip_norm", c) for c in np.atleast_1d(np.asarray(clip_norm))])
    model = pm.modelcontext(model)
    if epsilon is not None:
        return _bought(model, scaling, norms, check_epsilon(epsilon), at)
    if at is not None:
        raise ValueError("at is for bought counts: simulated records have the parameters drawn.")
    found = score_norms(model, scaling=scaling, data=data, draws=draws, random_seed=random_seed)
    everything = np.concatenate(found)
    whole = everything.sum()
    rows = [
        {
            "clipped": np.mean(everything > c),
            "worst": max(np.mean(x > c) for x in found),
            "kept": np.minimum(everything, c).sum() / whole if whole > 0 else 1.0,
        }
        for c in norms
    ]
    return pd.DataFrame(rows, index=pd.Index(norms, name="clip_norm"))


def _bought(
    model: Model, scaling: Any, norms: np.ndarray, epsilon: float, at: Mapping[str, Any] | None
) -> pd.DataFrame:
    budget = get_budget(model)
    if budget is None:
        raise ValueError(
            "epsilon is given, but the model has no budget to charge: "
            "dp.PrivacyBudget(epsilon=..., delta=...) in the model, or leave epsilon out."
        )
    check_model(budget, model)
    records = extract(model, **budget.secrecy)
    matrix = scaling_matrix(scaling, records.parameters, model)
    location = records.initial if at is None else _location(model, records, at)
    engine = RowEngine.of(records, Coordinates(location, matrix), None)
    preparation = Preparation.begin(
        engine,
        budget.account,
        sampler="clipping report",
        settings={"clip_norms": norms.tolist()},
        units=units_from_mu(mu_from_budget(epsilon, budget.delta)),
        n_public=budget.n_public,
    )
    rows = []
    try:
        for c in norms:
            # scores so long that the last bin, and no other, holds those above the clip norm
            spec = Score(Coordinates(location, matrix * (EDGES[-2] / c)))
            found = preparation.histogram(f"records above {c:g}", spec, 1.0 / len(norms))
            n = budget.n_public
            rows.append({"clipped": found.counts[-1] / n, "noise_sd": found.noise_sd / n})
    finally:
        preparation.finish()
    table = pd.DataFrame(rows, index=pd.Index(norms, name="clip_norm"))
    guarantee = "(epsilon, delta)-differential privacy" if preparation.secure else "none"
    table.attrs["privacy_guarantee"] = guarantee
    return table


def _location(model: Model, records: Records, at: Mapping[str, Any]) -> np.ndarray:
    """(d,) unconstrained parameters of a point."""
    names = [rv.name for rv in model.free_RVs]
    if set(at) != set(names):
        raise ValueError(f"at must give a value of each of {names}; it gives {sorted(at)}.")
    values = {name: numbers(f"at[{name!r}]", at[name]) for name in names}
    for rv in model.free_RVs:
        if rv.ndim != (ndim := values[rv.name].ndim):
            raise ValueError(f"at[{rv.name!r}] must have {rv.ndim} axes, not {ndim}.")
    draws = {name: value[None, None] for name, value in values.items()}
    location = unconstrain(model, records.parameters, draws)[0, 0]
    if not np.isfinite(location).all():
        raise ValueError("at is on the boundary of the support of a variable, or not finite.")
    return location


# -- their norms in a picture ---------------------------------------------------------------------


_WIDE = 20.0  # ratio of norms from which their axis is logarithmic


def plot_clip_advice(advice: ClipAdvice, *, ax: Axes | None = None) -> Axes:
    """Share of simulated records that a clip norm would clip, and the norm advised.

    Parameters
    ----------
    advice : ClipAdvice
        From :func:`pymc_dp.clip_advice`.
    ax : matplotlib.axes.Axes, optional
        Default: a new figure, 6.4 inches wide.

    Returns
    -------
    matplotlib.axes.Axes
        Clip norm in the coordinates z to the right, share of the records above it upwards, both
        logarithmic where the norms differ by a factor of more than 20, else the latter alone.

    Raises
    ------
    ValueError
        If `advice` is something else.

    Notes
    -----
    Records simulated at draws from the prior: no private record was read.

    Examples
    --------
    >>> dp.plot_clip_advice(dp.clip_advice(model, scaling=0.01))  # doctest: +SKIP
    """
    if not isinstance(advice, ClipAdvice):
        raise ValueError(
            f"advice must be what dp.clip_advice returns, not {type(advice).__name__}."
        )
    norms = np.array(list(advice.quantiles.values()))
    above = 1.0 - np.array(list(advice.quantiles))
    ax = axes_for(ax, (6.4, 4.0))
    ax.plot(
        norms, above, "o-", color=COLOURS[0], label=f"simulated, {advice.draws} draws of the prior"
    )
    ax.axvline(
        advice.clip_norm, color=LIMIT, linestyle="--", label=f"clip_norm = {advice.clip_norm:.3g}"
    )
    ax.set_yscale("log")
    ax.set_yticks(above, [f"{share:.3g}" for share in 100 * above])
    ax.minorticks_off()
    ax.set_ylim(0.6 * above.min(), 1.0)
    if norms.min() > 0 and norms.max() > _WIDE * norms.min():
        log_x_axis(ax)
    else:
        ax.set_xlim(0.0, 1.05 * norms.max() or 1.0)
    ax.set_xlabel("clip norm: norm of a record's score, in z")
    ax.set_ylabel("records above it, %")
    ax.legend(loc="lower left", frameon=False, fontsize="small")
    tidy(ax)
    return ax
