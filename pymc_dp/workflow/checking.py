"""A private posterior predictive check: does a released model describe its records?"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pymc.model import Model
from pytensor.graph.traversal import ancestors
from scipy.stats import chi2, norm

from pymc_dp.base.checks import check_epsilon, check_number
from pymc_dp.base.compat import working
from pymc_dp.base.matrices import positive_part
from pymc_dp.budget import PrivacyBudget, model_of, require_budget
from pymc_dp.privacy.accounting import epsilon_from_mu, mu_from_budget, units_from_mu
from pymc_dp.privacy.preparation import Preparation
from pymc_dp.records.bounds import source_limits
from pymc_dp.records.graph import RowGraph
from pymc_dp.reports import COLOURS, LIMIT, axes_for, mark, tidy
from pymc_dp.rows.contributions import law_unknown
from pymc_dp.rows.engine import RowEngine
from pymc_dp.workflow.discrepancies import (
    NAMED,
    Discrepancies,
    Statistic,
    below,
    checked_bounds,
    function,
    named,
)
from pymc_dp.workflow.estimates import Estimate, estimate_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Part of the variance of a statistic that a fit leaves at least, as it is known to first order.
_LEAST = 0.0005
_MOST_GROUPS = 1000

StatisticLike = str | tuple[str, float] | Callable[[Any], Any]


@dataclass(frozen=True, eq=False, repr=False)
class Bought(ABC):
    """A table that was bought; it prints with its cost, and says if nothing is guaranteed."""

    table: pd.DataFrame
    epsilon: float
    privacy_guarantee: str

    def __repr__(self) -> str:
        return f"{self._heading()}\n{self.table.to_string(float_format='{:.4g}'.format)}"

    def _repr_html_(self) -> str:
        return f"<p>{self._heading()}</p>{self.table.to_html(float_format='{:.4g}'.format)}"

    def _heading(self) -> str:
        return self._says() if self._secure else f"NO PRIVACY GUARANTEE. {self._says()}"

    @abstractmethod
    def _says(self) -> str:
        """What was bought, and for how much."""

    @property
    def _secure(self) -> bool:
        return self.privacy_guarantee != "none"


def refuse_hidden(what: str, epsilon: float, budget: PrivacyBudget, norm: float) -> float:
    """Noise sd of a sum of vectors of this norm; ValueError if it hides all that 1s add up to."""
    n, largest = budget.n_public, budget.sensitivity * norm
    noise_sd = largest / mu_from_budget(epsilon, budget.delta)
    if 2.0 * noise_sd > n:
        enough = epsilon_from_mu(10.0 * largest / n, budget.delta)
        raise ValueError(
            f"epsilon={epsilon:g} is too small: the noise of the {what} would hide whatever {n} "
            f"units add together. Nothing has been spent. Give about epsilon={enough:.2g} or more."
        )
    return noise_sd


def guarantee_of(preparation: Preparation, *estimates: Estimate) -> str:
    """What is guaranteed: "none" after insecure noise, now or in what was released before."""
    secure = preparation.secure and all(estimate.secure for estimate in estimates)
    return "(epsilon, delta)-differential privacy" if secure else "none"


@dataclass(frozen=True, eq=False, repr=False)
class PredictiveCheck(Bought):
    """A private check of a model, from :func:`pymc_dp.predictive_check`; may be published.

    Attributes
    ----------
    table : pandas.DataFrame
        A row for each statistic, and each group: ``records`` is the number of privacy units, with
        noise;
        ``difference`` what a record has of the statistic beyond what the model expects, on average
        (over the public number of records, where there is one);
        ``sd`` its standard deviation if the model is true, noise included; ``z`` their ratio;
        ``p_value``, two-sided; ``p_adjusted``, for as many comparisons as rows (Bonferroni);
        ``noise`` the share of the privacy noise in the variance; ``free`` the share of the variance
        of the statistic that fitting the parameters has left, more than 1 if noise in the fit adds.
    epsilon : float
        What it cost, at the budget's delta, if nothing else were released.
    privacy_guarantee : str
        "none" after insecure test noise, here or in `released`.
    chi2, dof, p_value : float
        All differences together.
    """

    chi2: float
    dof: float
    p_value: float

    def _says(self) -> str:
        return (
            f"Private predictive check, epsilon = {self.epsilon:g}: "
            f"chi2 = {self.chi2:.3g} with {self.dof:g} degrees of freedom, p = {self.p_value:.2g}."
        )

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Differences in their standard deviations, with the range that the model expects.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Default: a new figure.

        Returns
        -------
        matplotlib.axes.Axes
            A line for each statistic and group; grey: where 95 % would be if the model were true;
            dark: how far the privacy noise alone reaches.
        """
        rows = len(self.table)
        ax = axes_for(ax, (6.4, 1.2 + 0.32 * rows))
        ax.axvspan(-1.96, 1.96, color="0.92", label="95 % if the model is true")
        places = np.arange(rows)[::-1]
        noise = 1.96 * np.sqrt(self.table["noise"].to_numpy())
        ax.barh(places, 2 * noise, left=-noise, height=0.5, color="0.75", label="noise alone")
        z, adjusted = self.table["z"].to_numpy(), self.table["p_adjusted"].to_numpy()
        for far, colour, label in (
            (False, COLOURS[0], "as the model expects"),
            (True, COLOURS[1], "p < 0.05, adjusted"),
        ):
            some = (adjusted < 0.05) == far
            if some.any():
                ax.plot(z[some], places[some], "o", color=colour, label=label)
        ax.axvline(0.0, color=LIMIT, linewidth=0.8)
        labels = [" ".join(map(str, np.atleast_1d(key))) for key in self.table.index]
        ax.set_yticks(places, labels)
        ax.set_ylim(-0.7, rows - 0.3)
        widest = max(3.0, 1.1 * float(np.abs(z).max()))
        ax.set_xlim(-widest, widest)
        ax.set_xlabel("records less model, in standard deviations")
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
        mark(ax, self._secure)
        tidy(ax)
        return ax


def predictive_check(
    released: Any,
    model: Model | None = None,
    *,
    statistic: StatisticLike | Sequence[StatisticLike] | Mapping[str, StatisticLike] = (
        "mean",
        "dispersion",
        "zeros",
    ),
    epsilon: float,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    by: str | None = None,
    observed: str | None = None,
    progressbar: bool = True,
) -> PredictiveCheck:
    """Buy a posterior predictive check: statistics of the records, against what the model expects.

    Parameters
    ----------
    released : arviz.InferenceData or xarray.DataTree
        A released result of the model, with all free variables.
    model : pymc.Model, optional
        Default: the model of the context.
    statistic : str, tuple, callable, or a sequence or mapping of these
        ``"mean"`` and ``"dispersion"``: the standardised residual of a record, clamped to [-3, 3],
        and its square, clamped to [0, 9]; ``"zeros"``: whether it is 0; ``("quantile", q)``:
        whether it is at most the public number q; or a function of a tensor of outcomes, by
        elementwise operations, with `bounds`.  A mapping gives names.
    epsilon : float
        What the check may cost, at the budget's delta, if nothing else were released.
    bounds : mapping of str to (float, float), optional
        Public limits to which a function is clamped, by its name.  Narrow ones mean less noise.
    by : str, optional
        Name of a ``pm.Data`` of group labels that the likelihood uses as an index, or that has
        bounds: the check is made in each group.
    observed : str, optional
        The observed variable, where several are private.
    progressbar : bool, default True

    Returns
    -------
    PredictiveCheck

    Raises
    ------
    ValueError
        If an argument is out of its range, noise would hide all, the draws are about the prior, or
        the law of the records is not known.
    UnsafeRelease
        If `released` is no released result of this model and budget.
    UnsafeModel
        If the model has no budget.
    BudgetExceeded
        If the budget does not allow `epsilon`.

    Notes
    -----
    For a statistic s, the records give R = sum_i (s_i - e_i), with e_i the expectation of s under
    the model, at the features of record i and the released posterior mean.  Its plain predictive
    distribution would be too wide, as the parameters were fitted to the same records.  To first
    order the error of the mean is A (S + xi), with S the score of the records and xi the privacy
    noise in it; the covariance of sum_i s_i with S is G = sum_i d e_i / d theta (score identity).
    Averaged over the prior, the error has the covariance C of the noise-aware posterior, and

        Var(R) = sum_i Var(s_i) - G'(A + A')G + G' C G + (noise of this release)^2.

    Without noise in the score this is V - G' Sigma G, with Sigma the posterior covariance.
    One vector per record is released, once: s_i - e_i, the variances and covariances of s under the
    model, its derivatives of e, whitened, and 1 for being there.  The square of G is corrected for
    its noise.
    Where noise has moved the mean further than records do, expectations are averages over the error
    of the mean, to the third order: two points for each such direction, eight directions at most.

    *Guarantee.*  One Gaussian release of a sum of vectors with a public bound, charged before a
    record is read and shown in ``budget.table()``.  A vector is a function of its record, of the
    released mean, and of public numbers: expectations are sums over nodes of the model's own
    density, the same for equal records.  Units of several rows count by the average of their rows.

    *Assumptions.*  Statistics, bounds and groups are chosen without looking at the records;
    many records, so that sums are near normal; a posterior that is near normal in the
    unconstrained parameters, from the model's own likelihood.

    *Weaknesses.*  A statistic that the model fits by itself (its mean, with an intercept) leaves
    little to check: see ``free``.  Every statistic, and nothing else, adds noise, as the square
    root of their number; groups do not.  The bias of clipping in the fit, and a misfit of the
    posterior, show as differences.  Indicators of continuous outcomes have expectations of limited
    precision (about 20 nodes), which adds less than 1 % to a variance.  A small p-value says that
    the model is wrong, not that it is of no use.

    Examples
    --------
    >>> check = dp.predictive_check(released, model, epsilon=0.2)  # doctest: +SKIP
    >>> check.plot()  # doctest: +SKIP
    """
    epsilon = check_epsilon(epsilon)
    model = model_of(model)
    budget = require_budget(model, "dp.predictive_check")
    chosen = _statistics(statistic, bounds or {})
    with working("Compiling the model", progressbar):
        records = budget.records_of(model)
        estimate = estimate_of(released, model, budget, records.parameters)
        engine = RowEngine.of(records, estimate.coordinates)
        if engine.elsewhere is not None:
            raise ValueError("dp.predictive_check needs the records on this machine.")
        spec = discrepancies(engine, estimate, chosen, budget.n_public, model, by, observed)
    refuse_hidden("check", epsilon, budget, spec.norm)
    settings = {"observed": spec.observed, "by": by, "statistics": [s.name for s in chosen]}
    preparation = Preparation.begin(
        engine,
        budget.account,
        sampler="predictive check",
        settings=settings,
        units=units_from_mu(mu_from_budget(epsilon, budget.delta)),
        n_public=budget.n_public,
    )
    try:
        with working("Checking", progressbar):
            value, sd = preparation.vector_sum(f"check of {spec.observed}", spec, spec.norm, 1.0)
    finally:
        preparation.finish()
    n = budget.n_public if budget.neighboring == "replace_one" and by is None else None
    return judge(spec, estimate, value, sd, epsilon, guarantee_of(preparation, estimate), by, n)


def discrepancies(
    engine: RowEngine,
    estimate: Estimate,
    statistics: Sequence[Statistic],
    n: int,
    model: Model,
    by: str | None,
    observed: str | None,
) -> Discrepancies:
    """What each of `n` units adds; ValueError if its law is unknown, or names are wrong."""
    if why := law_unknown(engine):
        raise ValueError(
            f"What the model expects of a record cannot be computed. {why} A check needs one "
            "number per record with a distribution of PyMC. Nothing has been spent."
        )
    graphs = {
        name: group.functions.graph
        for group in engine.each_alone().groups
        for name in group.functions.graph.names
    }
    if observed is None and len(graphs) > 1:
        raise ValueError(f"Several variables are observed, {sorted(graphs)}: choose observed=.")
    name = next(iter(graphs), "") if observed is None else observed
    if name not in graphs:
        raise ValueError(
            f"observed={name!r} is no private observed variable that depends on parameters; those "
            f"are {sorted(graphs)}."
        )
    weight = math.sqrt(n / len(estimate.mean))
    leaf, groups = (None, 1) if by is None else _groups(graphs[name], by, model)
    at, points = estimate.coordinates, estimate.points()
    return Discrepancies(at, name, tuple(statistics), weight, leaf, groups, points)


def _groups(graph: RowGraph, by: str, model: Model) -> tuple[int, int]:
    """The leaf that holds the labels `by`, and how many groups there are."""
    places = set(range(len(graph.leaves))) - {outcome.leaf for outcome in graph.outcomes}
    types = {k: graph.leaves[k].block.type for k in places if graph.leaves[k].source.name}
    whole = [k for k, of in types.items() if of.ndim == 1 and not of.dtype.startswith("float")]
    labels = {graph.leaves[k].source.name: k for k in whole}
    if not isinstance(by, str) or by not in labels:
        given = repr(by) if isinstance(by, str) else f"a {type(by).__name__}"
        raise ValueError(
            f"by must name an integer pm.Data with one entry per record in the likelihood of "
            f"{graph.quoted}, one of {sorted(labels)}, not {given}. Give labels 0, 1, ... as "
            "pm.Data and use them there, as alpha[labels]."
        )
    leaf = graph.leaves[labels[by]]
    sizes = [size for label, size in graph.lookups if leaf.block in ancestors([label])]
    limits = source_limits(model).get(leaf.source)
    if limits is not None and np.isfinite(limits[1]).all():
        sizes.append(int(np.max(limits[1])) + 1)
    if not sizes:
        raise ValueError(
            f"How many groups {by!r} has is not known: use it as an index, alpha[{by}], or declare "
            f"dp.bounds({by}=(0, largest)) before the budget."
        )
    if min(sizes) > _MOST_GROUPS:
        raise ValueError(f"by={by!r} has more than {_MOST_GROUPS} groups: check fewer.")
    return labels[by], min(sizes)


def _statistics(given: Any, bounds: Mapping[str, Any]) -> list[Statistic]:
    if isinstance(given, str) or callable(given) or _is_quantile(given):
        given = [given]
    if not isinstance(given, Mapping):
        try:
            given = {_name(k, one): one for k, one in enumerate(given, 1)}
        except TypeError:
            raise ValueError(f"statistic must be {_KINDS}, not {given!r}.") from None
    if not given:
        raise ValueError("statistic is empty: name one, as statistic='zeros'.")
    if not isinstance(bounds, Mapping):
        raise ValueError("bounds must be a dict of (lower, upper) by the name of a statistic.")
    functions = {name for name, one in given.items() if callable(one)}
    if unknown := sorted(set(bounds) - functions):
        raise ValueError(
            f"bounds names {unknown}, which are no functions in statistic; those are "
            f"{sorted(functions)}. Other statistics have bounds of their own."
        )
    found = []
    for name, one in given.items():
        if callable(one):
            found.append(function(name, one, checked_bounds(name, bounds.get(name))))
        elif _is_quantile(one):
            found.append(below(check_number("q of ('quantile', q)", one[1])))
        elif one in NAMED:
            found.append(named(one))
        else:
            raise ValueError(f"statistic must be {_KINDS}, not {one!r}.")
    return found


_KINDS = f"one of {list(NAMED)}, ('quantile', q), a function, or several of these"


def _is_quantile(one: Any) -> bool:
    return isinstance(one, tuple) and len(one) == 2 and one[0] == "quantile"


def _name(k: int, one: Any) -> str:
    if callable(one):
        own = getattr(one, "__name__", "")
        return own if own.isidentifier() else f"statistic {k}"
    return str(one)


def judge(
    spec: Discrepancies,
    estimate: Estimate,
    value: np.ndarray,
    noise_sd: float,
    epsilon: float,
    guarantee: str,
    by: str | None,
    n: int | None = None,
) -> PredictiveCheck:
    """What a released sum says; post-processing.  `n` is the number of records, if it is public."""
    found, covariances, slopes, records = spec.read(value)
    groups, t = found.shape
    gain, error = estimate.in_z()
    middle = error - gain - gain.T
    flat = slopes.reshape(groups * t, -1)
    variance = np.zeros((groups * t, groups * t))
    for k, part in enumerate(covariances):
        variance[k * t : (k + 1) * t, k * t : (k + 1) * t] = positive_part(part, 1e-12)
    own = variance.diagonal().copy()
    fitted = variance + flat @ middle @ flat.T
    fitted -= np.eye(groups * t) * (noise_sd / spec.weight) ** 2 * np.trace(middle)
    unit = np.sqrt(np.maximum(own, 1e-300))
    left = positive_part(fitted / np.outer(unit, unit), _LEAST) * np.outer(unit, unit)
    predicted = left + noise_sd**2 * np.eye(groups * t)
    differences = found.ravel()
    sds = np.sqrt(predicted.diagonal())
    z = differences / sds
    p = 2.0 * norm.sf(np.abs(z))
    square = float(differences @ np.linalg.solve(predicted, differences))
    counts = np.maximum(np.repeat(records if n is None else [n], t), 1.0)
    scales = np.tile([statistic.scale for statistic in spec.statistics], groups)
    names = [statistic.name for statistic in spec.statistics]
    index = pd.Index(names, name="statistic")
    if by is not None:
        index = pd.MultiIndex.from_product([range(groups), names], names=[by, "statistic"])
    table = pd.DataFrame(
        {
            "records": np.repeat(records, t).round(),
            "difference": scales * differences / counts,
            "sd": scales * sds / counts,
            "z": z,
            "p_value": p,
            "p_adjusted": np.minimum(p * len(p), 1.0),
            "noise": noise_sd**2 / sds**2,
            "free": left.diagonal() / np.maximum(own, 1e-300),
        },
        index=index,
    )
    p_value = float(chi2.sf(square, len(z)))
    return PredictiveCheck(table, epsilon, guarantee, square, float(len(z)), p_value)
