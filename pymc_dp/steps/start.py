"""Where a private preparation starts: location and spread of the prior."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr
from pymc.distributions.continuous import FlatRV, HalfFlatRV
from pymc.distributions.transforms import CircularTransform
from pymc.logprob.transforms import IntervalTransform
from pymc.model import Model
from pytensor.graph.traversal import ancestors

from pymc_dp.budget import PrivacyBudget
from pymc_dp.publication.unconstrained import unconstrain
from pymc_dp.records.extraction import Records, draws_are_public
from pymc_dp.rows.coordinates import Coordinates
from pymc_dp.rows.functions import PublicTerms

_DRAWS = 500
#: Prior draws are public; the same seed makes a resumed preparation ask the same questions.
_SEED = 20_240_229
#: A proper log density must have fallen by `_FALL` at `_FAR` widths of the prior.
_FAR, _FALL = 1e6, 5.0
#: Number of places from which this is checked, and the largest log density that shows such a fall.
_PLACES, _EXACT = 5, 1e12
#: Message about a prior that has no density, or no draws.
NO_NUMBERS = (
    "Nothing has been spent. A prior may hold NaN or an infinite number: model.point_logps() says "
    "which one. Default priors that bambi scales by truncated or censored data may; give your own."
)


def prior_coordinates(
    records: Records, terms: PublicTerms, draws: np.ndarray | None
) -> Coordinates:
    """Initial point of the model, and the prior width of every parameter as a diagonal scaling.

    The width is half the width of the central 68 % of 500 prior draws (`few_prior_draws`, (m, d)),
    which heavy tails do not spoil.  Where the prior cannot be drawn from (``pm.Flat``), or draws
    with code of the user's own, it is the inverse root of the prior's curvature at the initial
    point, or 1.  All is in unconstrained space; `terms` are in the coordinates theta.
    """
    widths = np.full(records.parameters.size, np.nan)
    if draws is not None:
        low, high = np.quantile(draws, [0.16, 0.84], axis=0)
        widths = (high - low) / 2.0
    usable = np.isfinite(widths) & (widths > 0.0)
    if not usable.all():
        widths = np.where(usable, widths, _from_curvature(records.initial, terms))
    return Coordinates(records.initial, np.diag(widths))


def improper(
    model: Model,
    public: Sequence[str],
    terms: PublicTerms,
    start: Coordinates,
    draws: np.ndarray | None,
    names: Sequence[tuple[str, slice]],
) -> list[str]:
    """Names of the free variables that nothing public bounds, as ``pm.Flat`` and ``pm.HalfFlat``.

    These are found by their names in the graph, where no public observation depends on them, and
    others by the public log density along the axes, which does not fall.  A sum of two of them that
    a public observation bounds is not found.

    `terms` are in the coordinates theta; `names` are variables, and where their entries are in
    theta.
    """
    bounded = {*ancestors([rv for rv in model.observed_RVs if rv.name in set(public)])}
    if draws is None or not np.isfinite(draws).all():
        draws = np.random.default_rng(_SEED).standard_normal((_PLACES, len(start.location)))
        draws = start.location + draws @ start.scaling
    found = []
    for name, where in names:
        rv = model[name]
        transform = model.rvs_to_transforms[rv]
        named = rv not in bounded and not _is_bounding(transform, rv) and _is_flat(rv, model)
        periodic = isinstance(transform, CircularTransform)
        if named or not (periodic or _falls(terms, start, draws[:_PLACES], where)):
            found.append(name)
    return found


def _is_flat(rv: Any, model: Model) -> bool:
    """Whether a flat distribution is part of that of `rv`, apart from other free variables."""
    others = {*model.free_RVs} - {rv}
    nodes = {v.owner for v in ancestors([rv], blockers=others) if v.owner and v not in others}
    for node in nodes:
        inner = node.op.fgraph.apply_nodes if hasattr(node.op, "fgraph") else ()
        ops = [node.op, getattr(node.op, "base_rv_op", None), *(n.op for n in inner)]
        if any(isinstance(op, FlatRV | HalfFlatRV) for op in ops):
            return True
    return False


def _is_bounding(transform: Any, rv: Any) -> bool:
    if not isinstance(transform, IntervalTransform):
        return False
    return all(bound is not None for bound in transform.args_fn(*rv.owner.inputs))


def _falls(terms: PublicTerms, start: Coordinates, places: np.ndarray, where: slice) -> bool:
    """Whether the public log density falls far out on the axes of some parameters, or is not known.

    By 5 at 10^6 widths of the prior, where that of a Cauchy distribution has fallen by 27.  Looked
    at from several places, where no two parameters agree: a scale of 0 suits effects that are all
    the same, and a small one makes numbers in which 27 is lost.
    """

    def log_density(at: np.ndarray) -> float:
        try:
            return float(terms.log_density(at))
        except Exception:  # so far out, a model may refuse its parameters in any way
            return np.nan

    with np.errstate(all="ignore"):
        here = np.array([log_density(at) for at in places])
        exact = np.abs(here) < _EXACT
        known = here[exact]
        for j in range(*where.indices(len(start.location))):
            for sign in (-1.0, 1.0):
                far = places[exact]
                far[:, j] += sign * _FAR * start.scaling[j, j]
                # all places are looked at only where it does not fall
                falls = (not log_density(at) >= h - _FALL for at, h in zip(far, known, strict=True))
                if len(far) and not any(falls):
                    return False
    return True


def few_prior_draws(model: Model, budget: PrivacyBudget, records: Records) -> np.ndarray | None:
    """Always the same (500, d) draws; see `prior_draws`."""
    return prior_draws(model, budget, records, _DRAWS, _SEED)


def prior_draws(
    model: Model, budget: PrivacyBudget, records: Records, size: int, seed: int
) -> np.ndarray | None:
    """(size, d) draws from the prior in unconstrained space; None where it cannot be drawn from.

    The seed is public.
    """
    if not draws_are_public(model, budget.public, budget.longest_unnamed):
        return None
    try:
        draws = pm.draw(model.free_RVs, draws=size, random_seed=seed)
    except (NotImplementedError, ArithmeticError):  # without end: Flat, Uniform(-inf, inf)
        return None
    except ValueError as error:
        raise ValueError(f"PyMC cannot draw from the prior. {NO_NUMBERS}") from error
    if any(np.isnan(value).all(axis=0).any() for value in draws):  # PyMC 6 raises no error
        raise ValueError(f"PyMC cannot draw from the prior. {NO_NUMBERS}")
    dataset = xr.Dataset(
        {
            rv.name: (("chain", "draw", *[f"{rv.name}_{k}" for k in range(rv.ndim)]), value[None])
            for rv, value in zip(model.free_RVs, draws, strict=True)
        }
    )
    return unconstrain(model, records.parameters, dataset)[0]


def _from_curvature(initial: np.ndarray, terms: PublicTerms, step: float = 1e-3) -> np.ndarray:
    widths = np.ones(len(initial))
    for j in range(len(initial)):
        shift = step * np.eye(len(initial))[j]
        slope = terms.gradient(initial + shift)[j] - terms.gradient(initial - shift)[j]
        if slope < 0.0:
            widths[j] = 1.0 / np.sqrt(-slope / (2.0 * step))
    return widths
