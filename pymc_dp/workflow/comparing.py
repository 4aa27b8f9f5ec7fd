"""Which of several models predicts new records best: private differences of log density."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pymc.model import Model
from scipy.stats import norm

from pymc_dp.base.checks import check_epsilon, check_positive, warn
from pymc_dp.base.compat import working
from pymc_dp.base.matrices import Coordinates, root
from pymc_dp.budget import PrivacyBudget, require_budget
from pymc_dp.errors import UnsafeModel
from pymc_dp.privacy.accounting import epsilon_from_mu, mu_from_budget, units_from_mu
from pymc_dp.privacy.preparation import Preparation
from pymc_dp.records.ancestry import array_of, data_behind
from pymc_dp.records.units import private_observed
from pymc_dp.reports import COLOURS, LIMIT, axes_for, mark, tidy
from pymc_dp.rows.engine import Blocks, RowEngine
from pymc_dp.rows.joint import hashed
from pymc_dp.tuning.releases import heavy_quantile
from pymc_dp.workflow.checking import Bought, guarantee_of, refuse_hidden
from pymc_dp.workflow.estimates import Estimate, estimate_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Part of the cost for a look at how large ratios are, and of ratios that may be clipped.
_LOOK, _TAIL = 0.1, 0.002
#: Parts of an entry for products of ratios and of scores; the longest score, in typical ones.
_PRODUCTS, _SCORES, _LONGEST = 0.5, 0.5, 6.0
#: Bound on log ratios where noise hides how large they are, and as many sds of it as mostly do not.
_CLIP, _SEEN = 1.0, 30.0
_MOST_PARAMETERS = 100
_SURE = 0.05


class Together:
    """Records as several models see them; see :class:`pymc_dp.privacy.queries.Rows`.

    Unit number i is the same for all models.  `observed` are the sources of their outcomes.
    """

    elsewhere = None

    def __init__(
        self, engines: tuple[RowEngine, ...], observed: frozenset[Any], made_up: bool = False
    ) -> None:
        self.engines, self.observed, self.made_up = engines, observed, made_up
        self.n_units = min(engine.n_units for engine in engines)  # may be private, so no error

    def synthetic(self, value: int | None = 0, first: int = 0, last: int | None = None) -> Together:
        """The same functions on made-up data, other outcomes for each model."""
        made = tuple(engine.synthetic(value, first, last) for engine in self.engines)
        return Together(made, self.observed, made_up=True)

    def part(self, units: Any) -> Together:
        """The records of some units alone."""
        some = tuple(engine.part(units) for engine in self.engines)
        return Together(some, self.observed, self.made_up)

    def alike(self) -> np.ndarray:
        """(n_units,) whether a unit has the same outcomes in all models, in any order of rows."""
        found = np.array([_outcomes(engine, self.observed) for engine in self.engines])
        return (found == found[0]).all(axis=0) | self.made_up


def _outcomes(engine: RowEngine, observed: frozenset[Any]) -> np.ndarray:
    """(n_units,) a hash of what is observed of each unit."""
    total = np.zeros(engine.n_units, dtype="uint64")
    for group in engine.groups:
        rows = np.arange(group.n_rows)
        arrays = zip(group.functions.graph.leaves, group.store.read(), strict=True)
        for values in (array for leaf, array in arrays if leaf.source in observed):
            own = hashed([np.asarray(values, dtype="float64") + 0.0], rows, len(rows))  # -0 is 0
            np.add.at(total, rows if group.units is None else group.units, own)
    return total


_BLOCK = 4096


@dataclass(frozen=True, eq=False)
class Ratios:
    """Log-likelihoods of each unit at z = 0, in the models' `coordinates`, less the first one's.

    Clipped to `clip` each, and divided by it; or, without `clip`, the largest alone.  0 for a unit
    whose outcomes differ between models.
    """

    coordinates: tuple[Coordinates, ...]
    clip: float = math.inf
    nonnegative = False

    @property
    def size(self) -> int:
        """Entries per unit."""
        return 1

    @property
    def others(self) -> int:
        """How many models there are besides the first."""
        return len(self.coordinates) - 1

    def blocks(self, rows: Together) -> Blocks:
        """Units, and their (size, units) values, 0 where not finite."""
        for start in range(0, rows.n_units, _BLOCK):
            stop = min(start + _BLOCK, rows.n_units)
            part = rows.part(slice(start, stop))
            with np.errstate(all="ignore"):
                engines = [
                    engine.with_coordinates(at)
                    for engine, at in zip(part.engines, self.coordinates, strict=True)
                ]
                logs = [engine.log_likelihood(np.zeros(engine.d)) for engine in engines]
                found = self._values(engines, np.array([log - logs[0] for log in logs[1:]]))
            found = np.where(np.isfinite(found), found, 0.0)
            yield slice(start, stop), self._of_alike(found, part.alike())

    def _values(self, engines: list[RowEngine], ratios: np.ndarray) -> np.ndarray:
        return np.abs(ratios).max(axis=0, keepdims=True)

    def _of_alike(self, values: np.ndarray, alike: np.ndarray) -> np.ndarray:
        return np.where(alike, values, 0.0)


@dataclass(frozen=True, eq=False)
class Moments(Ratios):
    """Ratios r over the clip, products of these, and products of all models' scores in z.

    Products are packed, those off the diagonal times sqrt(2).  Scores of all models in one vector,
    divided by their typical length in `n` units, are cut off at `_LONGEST` of its square.  The last
    entry counts units whose outcomes differ between models; all others of these are 0.
    """

    n: int = 1

    @property
    def parameters(self) -> list[int]:
        """Of each model."""
        return [len(at.location) for at in self.coordinates]

    @property
    def size(self) -> int:
        """Entries per unit."""
        return self.others + _packed(self.others) + _packed(sum(self.parameters)) + 1

    @property
    def norm(self) -> float:
        """The largest l2 norm of a unit's entries."""
        others = self.others
        return math.sqrt(others + (_PRODUCTS * others) ** 2 + _SCORES**2)

    def _values(self, engines: list[RowEngine], ratios: np.ndarray) -> np.ndarray:
        r = np.clip(ratios, -self.clip, self.clip) / self.clip
        d = sum(self.parameters)
        vectors, place = np.empty((d, r.shape[1])), 0
        for engine in engines:
            for where, block in engine.vectors(engine.scores(np.zeros(engine.d))):
                vectors[place : place + engine.d, where] = block
            place += engine.d
        squares = np.zeros(r.shape[1])
        for row in vectors:
            squares += row * row
        vectors *= np.sqrt(_SCORES / np.maximum(squares, _LONGEST * d / self.n))
        none = np.zeros((1, r.shape[1]))
        return np.concatenate([r, _PRODUCTS * _products(r), _products(vectors), none])

    def _of_alike(self, values: np.ndarray, alike: np.ndarray) -> np.ndarray:
        values = np.where(alike, values, 0.0)
        values[-1] = np.where(alike, 0.0, self.norm)
        return values

    def differing(self, value: np.ndarray, noise_sd: float) -> int:
        """How many units have other outcomes in one model than in another; 0 if it may be noise."""
        return round(value[-1] / self.norm) if value[-1] > 5.0 * noise_sd else 0

    def read(self, value: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sums over units of r and of r r', in natural units, and of all scores u u', in z."""
        others, d = self.others, sum(self.parameters)
        first, second, third, _ = np.split(value, [others, others + _packed(others), -1])
        products = _matrix(second, others) * self.clip**2 / _PRODUCTS
        return self.clip * first, products, _matrix(third, d) * self.per_score

    @property
    def per_score(self) -> float:
        """What an entry of products of scores is multiplied by when it is read."""
        return _LONGEST * sum(self.parameters) / self.n / _SCORES


def _packed(d: int) -> int:
    return d * (d + 1) // 2


def _products(rows: np.ndarray) -> np.ndarray:
    pairs = zip(*np.triu_indices(len(rows)), strict=True)
    return np.array([rows[i] * rows[j] * (1.0 if i == j else math.sqrt(2.0)) for i, j in pairs])


def _matrix(packed: np.ndarray, d: int) -> np.ndarray:
    found = np.zeros((d, d))
    found[np.triu_indices(d)] = packed / math.sqrt(2.0)
    found += found.T
    found[np.diag_indices(d)] /= math.sqrt(2.0)
    return found


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Bought):
    """A private comparison of models, from :func:`pymc_dp.compare`; may be published.

    Attributes
    ----------
    table : pandas.DataFrame
        A row for each model, the best first: ``rank``; ``elpd_diff``, how much larger the expected
        log density of as many new records is under the best one; ``dse``, the standard error of
        that; ``noise_sd``, the part of it that the privacy noise of the comparison makes;
        ``p``, the effective number of parameters, noise included (no p-value); ``verdict``:
        "winner", "worse" than the best, or "cannot tell".
    epsilon : float
        What it cost, at the budget's delta, if nothing else were released.
    privacy_guarantee : str
        "none" after insecure test noise, here or in a released result.
    clip : float
        The largest log ratio that a record has counted for.
    note : str
        What to know of it: that noise hid how large ratios are, or that outcomes differ.
    """

    clip: float
    note: str = ""

    def _says(self) -> str:
        return f"Private comparison of models, epsilon = {self.epsilon:g}. {self.note}".rstrip()

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Differences to the best model, with intervals of 95 %.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Default: a new figure.

        Returns
        -------
        matplotlib.axes.Axes
            Thick: the part of an interval that the privacy noise makes.
        """
        ax = axes_for(ax, (6.4, 1.2 + 0.4 * len(self.table)))
        places = np.arange(len(self.table))[::-1]
        for place, (_, row) in zip(places, self.table.iterrows(), strict=True):
            colour = COLOURS[1] if row["verdict"] == "worse" else COLOURS[0]
            centre = -row["elpd_diff"]
            for sd, width in ((row["dse"], 1.5), (row["noise_sd"], 5.0)):
                ends = [centre - 1.96 * sd, centre + 1.96 * sd]
                ax.plot(ends, [place] * 2, color=colour, linewidth=width, solid_capstyle="butt")
            ax.plot(centre, place, "o", color=colour)
        ax.axvline(0.0, color=LIMIT, linestyle="--", linewidth=0.8)
        names = [f"{name}\n({verdict})" for name, verdict in self.table["verdict"].items()]
        ax.set_yticks(places, names)
        ax.set_ylim(-0.6, len(places) - 0.4)
        ax.set_xlabel("expected log density of new records, less that of the best model")
        mark(ax, self._secure)
        tidy(ax)
        return ax


def compare(
    models: Mapping[str, tuple[Any, Model]],
    *,
    epsilon: float,
    clip: float | None = None,
    forecast: bool = False,
    progressbar: bool = True,
) -> Comparison | pd.DataFrame:
    """Buy a comparison of models by how well they predict new records.

    Parameters
    ----------
    models : mapping of str to (released, model)
        Two or more released results, each with its model: of the same records in the same order,
        or with the same ids, and with budgets on one ledger.  The budget of the first one pays.
    epsilon : float
        What the comparison may cost, at the budget's delta, if nothing else were released.
    clip : float, optional
        Public bound on the log ratio of the densities of one record.  Default: a tenth of the cost
        buys a noisy histogram of these, whose upper 0.2 % may be clipped; or 1, if noise hides it.
    forecast : bool, default False
        Spend nothing, and say what the comparison could tell: see Returns.
    progressbar : bool, default True

    Returns
    -------
    Comparison or pandas.DataFrame
        With `forecast`, a table by clip: ``noise_sd``, that of the difference of two models in
        expected log density of all records, and ``smallest``, the difference that would be found
        with probability 0.8 if records did not vary.

    Raises
    ------
    ValueError
        If an argument is out of its range, noise would hide all, the models cannot have the same
        records, or one learned nothing from them.
    UnsafeModel
        If a model has no budget, or another ledger, or holds private what is public in another.
    UnsafeRelease
        If a result is no released one of its model and budget.
    BudgetExceeded
        If the budget of the first model does not allow `epsilon`.

    Notes
    -----
    With r_i = log p_a(y_i | theta_a) - log p_b(y_i | theta_b) at the released posterior means, the
    expected log density of n new records differs by n E[r].  The sum of r_i is too large by what
    each model has learned from the record itself: to first order, for an error A (S + xi) of the
    mean (:func:`pymc_dp.predictive_check`), by p = sum_i g_i' A g_i = tr(J A), with the scores g_i
    and J = sum_i g_i g_i': the optimism of leave-one-out cross-validation, linearised (Takeuchi's
    criterion).  Noise xi in a fit makes its predictions worse, and no optimism.  So ::

        elpd_diff = sum_i r_i - (p_a - p_b),
        dse^2 = sum_i (r_i - mean)^2 + |J_aa|^2 + |J_bb|^2 - 2 |J_ab|^2 + (noise)^2,

    with J of scores that are whitened by A: the middle is the uncertainty of the optimism, which
    alone is left for nested models that agree.  One vector per unit is released, once: r, clipped,
    its square, and the products of its scores.

    *Guarantee.*  One Gaussian release, or two, charged before a record is read and shown in
    ``budget.table()`` of the first model.  The result also tells of the released means, so budgets
    of all models stand behind it; the ledger counts them together.

    *Assumptions.*  Row number i, or id number i of a `privacy_unit`, is the same unit in all
    models, as it is in all arrays of one: else a unit would count twice.  No exact look at records
    checks it, as whether arrays are equal may depend on one record.  A unit whose outcomes differ
    between models adds nothing but to a count, which is released too: a warning says if they are
    many.  Posterior means stand for posteriors; many records.

    *Weaknesses.*  Clipped ratios count for less than they are: a model with rare disasters looks
    better than it is.  Scores beyond 2.4 times their typical length are cut off, and ``p`` is too
    small: by about 7 % in normal regressions, more where scores have heavy tails.  The same budget
    buys differences of about `clip` times the noise: forecast first.  The winner of many models is
    chosen by the same noise; differences to it are optimistic.

    Examples
    --------
    >>> dp.compare({"a": (idata_a, a), "b": (idata_b, b)}, epsilon=0.5)  # doctest: +SKIP
    """
    epsilon = check_epsilon(epsilon)
    clip = None if clip is None else check_positive("clip", clip)
    budget, observed = _same_records(models)
    n, units = budget.n_public, units_from_mu(mu_from_budget(epsilon, budget.delta))
    share = 1.0 if clip is not None else 1.0 - _LOOK
    with working("Compiling the models", progressbar):
        engines, estimates = [], []
        for released, model in models.values():
            own = require_budget(model, "dp.compare")
            records = own.records_of(model)
            estimates.append(estimate_of(released, model, own, records.parameters))
            engines.append(RowEngine.of(records, estimates[-1].coordinates))
    if any(engine.elsewhere is not None for engine in engines):
        raise ValueError("dp.compare needs the records on this machine.")
    if sum(engine.d for engine in engines) > _MOST_PARAMETERS:
        raise ValueError(f"models have more than {_MOST_PARAMETERS} parameters together.")
    coordinates = tuple(_by_gain(estimate) for estimate in estimates)
    blank = Moments(coordinates, 1.0, n)
    sd = refuse_hidden("comparison", epsilon, budget, blank.norm) / math.sqrt(share)
    seen = _SEEN * math.sqrt(budget.sensitivity / _LOOK) / n  # the mu
    enough = epsilon_from_mu(seen, budget.delta)
    hidden = (
        f"At epsilon={epsilon:g} noise hides how large log ratios are, so clip={_CLIP:g} is used: "
        f"safe, but noisy. Give a public clip=, or about epsilon={enough:.2g}."
    )
    if forecast:
        if clip is None and epsilon < enough:
            warn(hidden)
        clips = np.array([0.03, 0.1, 0.3, 1.0, 3.0] if clip is None else [clip])
        found = {"noise_sd": clips * sd, "smallest": clips * sd * 2.8}
        return pd.DataFrame(found, index=pd.Index(clips, name="clip"))
    rows: Any = Together(tuple(engines), observed)
    settings = {"models": list(models), "clip": clip}
    preparation = Preparation.begin(
        rows, budget.account, sampler="comparison", settings=settings, units=units, n_public=n
    )
    note = ""
    try:
        with working("Comparing", progressbar):
            if clip is None:
                look = preparation.histogram("log ratios", Ratios(coordinates), _LOOK)
                clip = heavy_quantile(look, _TAIL, float(n))[0]
            if not clip:  # where ratios are 0, records may have other outcomes, which are counted
                note = hidden if clip is None else "Log ratios of nearly all records are 0."
                clip = _CLIP
            spec = Moments(coordinates, clip, n)
            value, sd = preparation.vector_sum("comparison", spec, spec.norm, share)
    finally:
        preparation.finish()
    differing = spec.differing(value, sd)
    if differing:
        note = (
            f"About {differing} of {n} units have other outcomes in one model than in another, and "
            "the models cannot be compared. Give each the same observed arrays, in the same order."
        )
        warn(note)
    table = ranked(list(models), spec, None if differing else value, sd)
    return Comparison(table, epsilon, guarantee_of(preparation, *estimates), clip, note)


def _by_gain(estimate: Estimate) -> Coordinates:
    """Coordinates in which g' A g is |g|^2."""
    gain = estimate.gain
    return Coordinates(estimate.mean, root((gain + gain.T) / 2.0))


def _same_records(models: Any) -> tuple[PrivacyBudget, frozenset[Any]]:
    """The budget of the first model, and the sources of all outcomes.

    An error unless the models are about the same records, as far as public facts tell.
    """
    if not isinstance(models, Mapping) or len(models) < 2:
        raise ValueError("models must be a dict of two or more: {name: (released, model), ...}.")
    for name, pair in models.items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Model)):
            raise ValueError(f"models[{name!r}] must be (released, model), a result and its model.")
    budgets = [require_budget(model, "dp.compare") for _, model in models.values()]
    for one, other in pairwise(budgets):
        if one.ledger.path != other.ledger.path:
            raise UnsafeModel(
                "The models have budgets on several ledgers, so neither would count what the "
                "comparison tells. Give all the same: ledger = dp.Ledger.create(path), "
                "dp.PrivacyBudget(..., ledger=ledger)."
            )
    for (one, mine), (other, theirs) in combinations(zip(models.values(), budgets, strict=True), 2):
        named = [{rv.name for rv in (*m.data_vars, *m.observed_RVs)} for _, m in (one, other)]
        # all records may read what is public
        if partly := sorted((set(mine.public) ^ set(theirs.public)) & named[0] & named[1]):
            raise UnsafeModel(
                f"{partly} are public for one model and private for another. Give all budgets the "
                "same public=."
            )
    sources = [
        {rv.name: _source(model, rv) for rv in private_observed(model, budget.public)}
        for (_, model), budget in zip(models.values(), budgets, strict=True)
    ]
    facts = [
        (budget.n_public, sorted(np.shape(array_of(source))[1:] for source in of.values()))
        for budget, of in zip(budgets, sources, strict=True)
    ]
    if any(one != other for one, other in pairwise(facts)):
        raise ValueError(
            "The models have not the same records: give each the same observed arrays, in the same "
            "order, with the same privacy_unit and n_public."
        )
    if any(one.keys() != other.keys() for one, other in pairwise(sources)):
        warn(
            "The observed variables of these models have other names. Comparing them makes sense "
            "only if they hold the same outcomes, record by record."
        )
    return budgets[0], frozenset(source for of in sources for source in of.values())


def _source(model: Model, rv: Any) -> Any:
    source = data_behind(model.rvs_to_values[rv])
    if source is None:
        raise ValueError(f"`{rv.name}` is computed from data: observe an array, or pm.Data.")
    return source


def ranked(
    names: list[str], spec: Moments, value: np.ndarray | None, noise_sd: float
) -> pd.DataFrame:
    """What a released sum says of models; nothing without one.  Post-processing."""
    count = len(names)
    if value is None:
        nothing = np.full(count, math.nan)
        columns = dict.fromkeys(("rank", "elpd_diff", "dse", "noise_sd", "p"), nothing)
        index = pd.Index(names, name="model")
        return pd.DataFrame({**columns, "verdict": "cannot tell"}, index=index)
    ratios, products, scores = spec.read(value)
    ends = np.cumsum([0, *spec.parameters])
    parts = [slice(*pair) for pair in pairwise(ends.tolist())]
    p = np.array([np.trace(scores[part, part]) for part in parts])
    total = np.concatenate([[0.0], ratios]) - p
    of_p = noise_sd * spec.per_score * np.sqrt(spec.parameters)
    best = int(total.argmax())
    order = np.argsort(-total, kind="stable")
    rows: list[list[float]] = []
    for k in order:
        w = np.zeros(count)
        w[best] += 1.0
        w[k] -= 1.0
        inside = w[1:]
        mean = float(inside @ ratios) / spec.n
        spread = max(float(inside @ products @ inside) - spec.n * mean**2, 0.0)
        noise = (noise_sd * spec.clip) ** 2 * inside @ inside + (np.abs(w) * of_p**2).sum()
        unsure = _of_optimism(scores, parts[best], parts[k], noise_sd * spec.per_score)
        dse = 0.0 if k == best else math.sqrt(spread + noise + unsure)
        rows.append([len(rows), total[best] - total[k], dse, math.sqrt(noise), p[k]])
    table = pd.DataFrame(
        rows,
        columns=["rank", "elpd_diff", "dse", "noise_sd", "p"],
        index=pd.Index([names[k] for k in order], name="model"),
    )
    limit = norm.isf(_SURE / 2.0)
    worse = np.array(table["elpd_diff"] > limit * table["dse"])
    worse[0] = False
    table["verdict"] = np.where(worse, "worse", "cannot tell")
    if worse[1:].all():
        table.loc[table.index[0], "verdict"] = "winner"
    return table


def _of_optimism(scores: np.ndarray, a: slice, b: slice, noise_sd: float) -> float:
    """Variance of the difference of two optimisms, beyond that which the ratios have."""

    def square(one: slice, other: slice) -> float:  # less that of the noise, of packed entries
        matrix = scores[one, other]
        entries = _packed(len(matrix)) if one == other else matrix.size / 2.0
        return float(np.sum(matrix**2) - entries * noise_sd**2)

    return max(square(a, a) + square(b, b) - 2.0 * square(a, b), 0.0)
