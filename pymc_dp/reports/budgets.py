"""What was spent, what it promises, and what a budget can be expected to buy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pymc.model import Model

from pymc_dp.base import compat as _compat
from pymc_dp.base.checks import check_delta, check_epsilon
from pymc_dp.budget import MODELS, PrivacyBudget, get_budget, name_of, require_budget
from pymc_dp.privacy.accounting import (
    MU2_UNIT,
    BatchEvent,
    FixedBatchGaussianEvent,
    GaussianEvent,
    SubsampledGaussianEvent,
    batch_event,
    epsilon_from_mu,
    mu_from_budget,
    mu_from_units,
)
from pymc_dp.privacy.subsampled import epsilon_of
from pymc_dp.publication.publish import statement_facts
from pymc_dp.reports import (
    COLOURS,
    LIMIT,
    REFERENCE,
    axes_for,
    check_choice,
    legend_above,
    log_x_axis,
    mark,
    rows_for_legend,
    tidy,
)
from pymc_dp.reports.diagnostics import is_labelled
from pymc_dp.rows.contributions import score_norms
from pymc_dp.tuning.forecast import forecast_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# -- what was spent -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Charges:
    """What was spent, and under which budget, where there is one."""

    units: int  #: Squared mu of releases on all units, in ledger units.
    batches: tuple[tuple[BatchEvent, int], ...] = ()  #: Releases on batches, and their numbers.
    neighboring: str = "replace_one"
    epsilon: float | None = None  #: As the budget was stated.
    delta: float | None = None
    cap: int | None = None  #: The budget in ledger units.
    secure: bool = True  #: False for draws that were made with insecure test noise.

    @property
    def stated(self) -> str:
        """The budget in words."""
        return f"budget: ε = {self.epsilon:g}, δ = {self.delta:g}"

    @property
    def usual_delta(self) -> float:
        """The delta stated, or a usual one."""
        return 1e-6 if self.delta is None else self.delta

    def epsilon_at(self, delta: float) -> float:
        """Epsilon of all that was spent, at this delta."""
        return epsilon_of(self.batches, self.units, delta, self.neighboring)


class Part(NamedTuple):
    """A part of the budget: who spent it, on what, and how large it is."""

    sampler: str
    mechanism: str
    share: float


def charges_of(spent: Any) -> Charges:
    """What was spent under a budget, for a released result, or by a list of events."""
    found: dict[str, Any] | None
    if isinstance(spent, PrivacyBudget):
        found, stated, secure = spent.batches(), vars(spent), True
        account = spent.account.read()
        units, cap = account.spent, account.cap
    elif is_labelled(spent):
        stated = _facts_of_one(spent)
        found, secure = stated["batches"], stated["privacy_guarantee"] != "none"
        units = round(stated["spent"]["gdp_mu2"] * MU2_UNIT)
        cap = round(stated["preparation"]["budget_mu2"] * MU2_UNIT)
    else:
        return _of_events(spent)
    return Charges(
        max(units - (found["reserved"] if found else 0), 0),  # a float has 53 bits
        ((batch_event(found["event"]), found["releases"]),) if found else (),
        stated["neighboring"],
        stated["epsilon"],
        stated["delta"],
        cap,
        secure,
    )


def _of_events(spent: Any) -> Charges:
    batched = (SubsampledGaussianEvent, FixedBatchGaussianEvent)
    if isinstance(spent, GaussianEvent | SubsampledGaussianEvent | FixedBatchGaussianEvent):
        spent = [spent]
    units, batches = 0, []
    for entry in spent if isinstance(spent, list | tuple) else [None]:
        event, count = entry if isinstance(entry, tuple) else (entry, 1)
        if isinstance(event, GaussianEvent):
            units += count * event.cost
        elif isinstance(event, batched):
            batches.append((event, count))
        else:
            raise ValueError(
                "spent must be a PrivacyBudget, a released result, or privacy events such as "
                f"[(GaussianEvent('sum', 20.0), 100)]; got {type(spent).__name__}."
            )
    if not units and not batches:
        raise ValueError("spent holds no event.")
    return Charges(units, tuple(batches))


def _parts_of_budget(budget: PrivacyBudget) -> list[Part]:
    """Parts from its table, with all rounds of a search for the posterior in one part."""
    table = budget.table()
    table = table[table["mechanism"] != ""]
    sampler = table["sampler"].replace("", "releases on batches")
    rounds = table["mechanism"].str.extract(r"^round (\d+): ", expand=False).astype(float)
    last = rounds.groupby(sampler).transform("max").map("rounds 1 to {:.0f}".format)
    named = table["mechanism"].where(rounds.isna(), last)
    shares = table.groupby([sampler, named.replace("rounds 1 to 1", "round 1")], sort=False)
    return [Part(who, what, share) for (who, what), share in shares["share"].sum().items()]


def _facts_of_one(released: Any) -> dict[str, Any]:
    """The statement of a result with one ledger."""
    facts = statement_facts(released)
    if "owners" in facts:
        raise ValueError(
            "spent is a result of several owners, and each has charged a ledger of its own: pass "
            "the budget of one of them."
        )
    return facts


def parts_of_statement(facts: dict[str, Any]) -> list[Part]:
    """The preparation as a whole, then the mechanisms of the chains as they were planned."""
    cap, sampler = facts["preparation"]["budget_mu2"], facts["sampler"]
    before = facts["preparation"]["gdp_mu2"] / cap
    found = facts["batches"]
    batches = found["reserved"] / MU2_UNIT / cap if found else 0.0
    left = facts["spent"]["gdp_mu2"] / cap - before - batches
    planned = {
        name: facts["chains"]
        * (m["at_start"] + (facts["draws"] + facts["tune"]) * m["per_iteration"])
        * GaussianEvent(name, m["noise_multiplier"]).cost
        / MU2_UNIT
        / cap
        for name, m in facts["mechanisms"].items()
    }
    total = sum(planned.values())
    made = min(1.0, max(left, 0.0) / total) if total else 1.0  # a run may have been interrupted
    parts = [Part("preparation", f"{facts['preparation']['releases']} releases before", before)]
    if found:
        event = batch_event(found["event"])
        parts.append(Part("releases on batches", f"{event.mechanism}, {event.batch}", batches))
    parts += [Part(sampler, name, share * made) for name, share in planned.items()]
    parts.append(Part("other runs and statistics", "releases", left - total * made))
    return [part for part in parts if part.share > 1e-9]


# -- where a budget went --------------------------------------------------------------------------


_POINTS, _FEW_POINTS = 200, 5  # of a curve: a millisecond each; with batches a second
_MANY = 100  # number of releases from which their axis is logarithmic


def plot_budget(spent: Any, kind: str = "mechanism", *, ax: Axes | None = None) -> Axes:
    """What the budget was spent on, or how it was used up.

    Parameters
    ----------
    spent : PrivacyBudget, or arviz.InferenceData or xarray.DataTree
        A budget, of which the ledger is drawn, or a released result, of which the statement is.
    kind : {"mechanism", "time"}
        - "mechanism": one bar for each mechanism, end to end, as shares of the budget in squared
          GDP mu, since epsilons do not add up.  The rounds of a search for the posterior are one
          bar; of a released result, all that came before the chains is one.
        - "time": epsilon at the budget's delta, of everything up to a release, against the number
          of the release; of a released result against the draw that all chains have made.
    ax : matplotlib.axes.Axes, optional
        Default: a new figure, 6.4 inches wide.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    UnsafeRelease
        If a result was not released.
    ValueError
        If `kind` or `ax` is none, nothing was spent yet, or a result has no chains to draw over
        time.

    Notes
    -----
    Shown are the charges that the ledger has, unused parts of leases that are still open among
    them; nothing is charged and no record is read.

    Examples
    --------
    >>> dp.plot_budget(budget)  # doctest: +SKIP
    >>> dp.plot_budget(released, kind="time")  # doctest: +SKIP
    """
    check_choice("kind", kind, ("mechanism", "time"))
    if isinstance(spent, PrivacyBudget):
        parts = _parts_of_budget(spent)
    elif is_labelled(spent):
        parts = parts_of_statement(_facts_of_one(spent))
    else:
        raise ValueError(
            f"spent must be a PrivacyBudget or a released result, not {type(spent).__name__}."
        )
    charges = charges_of(spent)
    if not parts:
        raise ValueError("spent is a budget of which nothing was spent yet: sample first.")
    if kind == "time":
        ax = _over_time(spent, charges, ax)
    else:
        ax = _by_mechanism(parts, charges, ax)
    mark(ax, charges.secure)
    tidy(ax)
    return ax


def _by_mechanism(parts: Sequence[Part], charges: Charges, ax: Axes | None) -> Axes:
    samplers = list(dict.fromkeys(part.sampler for part in parts))
    ax = axes_for(ax, (6.4, 1.0 + 0.24 * (len(parts) + len(samplers) + 1)))
    begin = 0.0
    for row, part in enumerate(parts):
        end = begin + part.share
        colour = COLOURS[samplers.index(part.sampler) % len(COLOURS)]
        new = part.sampler not in ax.get_legend_handles_labels()[1]
        label = part.sampler if new else None
        ax.barh(row, part.share, 0.75, begin, color=colour, label=label)
        # beside the bar where there is room, within it where there is none
        x, shift, align, ink = (end, 4, "left", "black")
        if part.share > 0.85:
            x, shift, align, ink = (0.5 * (begin + end), 0, "center", "white")
        elif end >= 0.85:
            x, shift, align, ink = (begin, -4, "right", "black")
        ax.annotate(
            f"{part.share:.1%}",
            (x, row),
            (shift, 0),
            textcoords="offset points",
            ha=align,
            va="center",
            color=ink,
            fontsize="small",
        )
        begin = end
    ax.axvline(1.0, color=LIMIT, linestyle="--", label=charges.stated)
    ax.set_yticks(
        range(len(parts)), [part.mechanism.replace(", ", ",\n") for part in parts], fontsize="small"
    )
    ax.set_ylim((len(parts) - 0.4) * (1.0 + rows_for_legend(ax)), -0.6)
    ax.set_xlim(0.0, 1.04)
    ax.xaxis.set_major_formatter(lambda x, _: f"{100 * x:g} %")
    spent = charges.epsilon_at(charges.usual_delta)
    ax.set_xlabel(f"share of the budget (µ²); spent: ε = {spent:.3g}")
    ax.legend(loc="lower left", frameon=False, fontsize="small")
    return ax


def _over_time(spent: Any, charges: Charges, ax: Axes | None) -> Axes:
    if isinstance(spent, PrivacyBudget):
        curves = _history(spent)
        what = "number of the release"
    else:
        curves = [_recorded(spent)]
        what = "draw that every chain has made"
    ax = axes_for(ax, (6.4, 4.0))
    samplers = list(dict.fromkeys(curve[0] for curve in curves))
    for sampler, numbers, epsilons in curves:
        new = sampler not in ax.get_legend_handles_labels()[1]
        ax.plot(
            numbers,
            epsilons,
            # what is charged for a release is charged before it is made
            drawstyle="steps-pre",
            color=COLOURS[samplers.index(sampler) % len(COLOURS)],
            linewidth=2.0,
            label=sampler if new else None,
        )
    assert charges.epsilon is not None  # a budget and a statement have one
    ax.axhline(charges.epsilon, color=LIMIT, linestyle="--", label=charges.stated)
    last = curves[-1][1][-1]
    if isinstance(spent, PrivacyBudget) and last > _MANY:
        ax.set_xscale("log")
    ax.set_xlim(1, max(last, 2) * (1.1 if last > _MANY else 1.02))
    legend_above(ax, 0.0, 1.03 * charges.epsilon)
    ax.set_xlabel(what)
    ax.set_ylabel(f"ε charged so far, at δ = {charges.delta:g}")
    return ax


def _history(budget: PrivacyBudget) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """By sampler, numbers of releases and epsilon of all up to there, oldest first."""
    steps: list[list[Any]] = []  # plan, event, sampler, number
    for plan_id, plan, event, count in budget.releases():
        for step in reversed(steps if count < 0 else []):  # unused leases: off the newest charges
            if step[:2] == [plan_id, event]:
                taken = min(step[3], -count)
                step[3] -= taken
                count += taken
        steps.append([plan_id, event, plan["sampler"], max(count, 0)])
    steps = [step for step in steps if step[3]]
    found = budget.batches()
    first = 0 if found is None else found["releases"]
    numbers = first + np.cumsum([count for *_, count in steps], dtype=int)
    units = np.cumsum([count * event.cost for _, event, _, count in steps], dtype=object)
    curves = []
    if found is not None:  # charged as a whole, before the others
        epsilon = budget.epsilon_of(0, found)
        curves.append(("releases on batches", np.array([1, first]), np.full(2, epsilon)))
    stride = -(-len(steps) // (_POINTS if found is None else _FEW_POINTS))
    begin = max(first, 1)
    before = budget.epsilon_of(int(units[0]), found) if steps else 0.0
    for sampler, places in groupby(range(len(steps)), key=lambda k: steps[k][2]):
        every = list(places)
        kept = sorted({*every[stride - 1 :: stride], every[-1]})
        values = [budget.epsilon_of(int(units[k]), found) for k in kept]
        curves.append((sampler, np.array([begin, *numbers[kept]]), np.array([before, *values])))
        begin, before = numbers[kept[-1]], values[-1]
    return curves


def _recorded(released: Any) -> tuple[str, np.ndarray, np.ndarray]:
    """Sampler, draws, and the epsilon that its chains noted."""
    groups = _compat.group_names(released) if _compat.is_result(released) else []
    stats = _compat.group(released, "sample_stats") if "sample_stats" in groups else {}
    if "dp_epsilon" not in stats:
        raise ValueError(
            "spent has no dp_epsilon in its sample_stats: no chains were run for it. Use "
            "kind='mechanism', or pass the budget."
        )
    epsilons = np.asarray(stats["dp_epsilon"].max("chain").values)
    return "chains", np.arange(1, len(epsilons) + 1), epsilons


# -- which guarantees hold ------------------------------------------------------------------------


def plot_epsilon_delta(
    spent: Any, deltas: Sequence[float] | None = None, *, ax: Axes | None = None
) -> Axes:
    """Every (epsilon, delta) guarantee that holds for what was spent.

    Parameters
    ----------
    spent : PrivacyBudget, InferenceData, DataTree, or events
        A budget; a released result, of which the statement is drawn; or an event of
        ``pymc_dp.privacy.accounting``, a list of them, or a list of pairs (event, number of
        releases). Events are taken to be under ``replace_one``, which matters for batches alone.
    deltas : sequence of float, optional
        Where to compute epsilon, each strictly between 0 and 1.  Default: 60 values from 10^-4
        times the stated delta to 0.1.  For releases on batches of records, which take about a
        second each and have no guarantee at very small deltas, 6 values from the stated delta.
    ax : matplotlib.axes.Axes, optional
        Default: a new figure, 6.4 inches wide.

    Returns
    -------
    matplotlib.axes.Axes
        Epsilon to the right, delta upwards, logarithmic.  Below and to the left of the curve no
        guarantee is claimed.

    Raises
    ------
    UnsafeRelease
        If a result was not released.
    ValueError
        If an argument is not usable.

    Notes
    -----
    The statement of a release is the point that the budget promised; what was charged by then is no
    promise if stopping depended on what was seen.  The grey curve is the whole budget; there is
    none for releases on batches of records, which are accounted at the budget's own delta alone.

    Examples
    --------
    >>> from pymc_dp.privacy.accounting import GaussianEvent
    >>> ax = dp.plot_epsilon_delta([(GaussianEvent("sum", 20.0), 100)])  # doctest: +SKIP
    """
    charges = charges_of(spent)
    grid = _deltas(deltas, charges)
    ax = axes_for(ax, (6.4, 4.0))
    if charges.cap is not None and not charges.batches:
        mu = mu_from_units(charges.cap)
        whole = [epsilon_from_mu(mu, delta) for delta in grid]
        label = f"the whole budget, {mu:.3g}-GDP"
        ax.plot(whole, grid, color=REFERENCE, linewidth=5.0, label=label)
    label = "charged"
    if not charges.batches:
        label += f", {mu_from_units(charges.units):.3g}-GDP"
    found = [charges.epsilon_at(delta) for delta in grid]
    ax.plot(found, grid, color=COLOURS[0], linewidth=2.0, label=label)
    if charges.epsilon is not None and charges.delta is not None:
        stated, at = [charges.epsilon], [charges.delta]
        ax.plot(stated, at, "o", color=LIMIT, markersize=7, label=charges.stated, zorder=3)
    ax.set_yscale("log")
    ax.set_xlim(left=0.0)
    ax.set_xlabel("ε")
    ax.set_ylabel("δ")
    legend_above(ax, 0.5 * grid[0], min(2.0 * grid[-1], 1.0))
    mark(ax, charges.secure)
    tidy(ax)
    return ax


def _deltas(deltas: Sequence[float] | None, charges: Charges) -> np.ndarray:
    if deltas is None:
        delta = charges.usual_delta
        if charges.batches:
            return np.geomspace(delta, 1e-2, 6)
        return np.geomspace(1e-4 * delta, 0.1, 60)
    values = np.atleast_1d(np.asarray(deltas, dtype="float64"))
    if values.ndim != 1 or len(values) < 2:
        raise ValueError("deltas must be a list of at least two numbers, from which a curve goes.")
    return np.array(sorted(check_delta(float(value)) for value in values))


# -- what a budget can be expected to buy ----------------------------------------------------------


def plot_effective_draws(
    model: Model | PrivacyBudget,
    epsilons: Sequence[float] | None = None,
    *,
    step: Any = "DPLangevin",
    draws: int = 1000,
    tune: int = 0,
    chains: int = 4,
    ax: Axes | None = None,
) -> Axes:
    """Effective draws that a budget can be expected to buy, against its epsilon.

    Parameters
    ----------
    model : pymc.Model or PrivacyBudget
        A model with a budget, or the budget of a model.
    epsilons : sequence of float, optional
        At the budget's delta.  Default: 25 values from a tenth of the budget to ten times it.
    step : name, class, or list of them, default "DPLangevin"
        Step methods that ``budget.plan`` knows.
    draws, tune, chains : int
        As in ``budget.plan``.
    ax : matplotlib.axes.Axes, optional
        Default: a new figure, 6.4 inches wide.

    Returns
    -------
    matplotlib.axes.Axes
        Both axes logarithmic.  Solid: effective draws of all chains together; dotted where these
        would sample a normal approximation of the likelihood ("quadratic"), which costs no budget.
        Dashed, for ``DPLangevin``: independent draws that would estimate a posterior mean equally
        well, privacy noise and Monte-Carlo error together.  Vertical: the budget, and its rest.

    Raises
    ------
    UnsafeModel
        If the model has no budget.
    ValueError
        If an argument is not usable.

    Notes
    -----
    *Guarantee.*  Arithmetic on public numbers by ``budget.plan``: nothing is spent, nothing is
    written to a ledger, no record is read.

    *Weaknesses.*  Rules of thumb for posteriors near normal.

    Examples
    --------
    >>> dp.plot_effective_draws(model, step=["DPLangevin", "DPHMC"])  # doctest: +SKIP
    """
    model, budget = _model_of(model)
    if epsilons is None:
        grid = budget.epsilon * np.geomspace(0.1, 10.0, 25)
    else:
        grid = np.array(sorted(check_epsilon(float(epsilon)) for epsilon in epsilons))
    if len(grid) < 2:
        raise ValueError("epsilons must be a list of at least two numbers.")
    names = list(step) if isinstance(step, list | tuple) else [step]
    records = budget.records_of(model, check=False, read=False)
    known: dict[str, Any] = {"d": records.parameters.size, "norms": score_norms(records)}
    mu2s = [mu_from_budget(float(epsilon), budget.delta) ** 2 for epsilon in grid]
    plans = [
        [forecast_of(budget, name_of(name), draws, tune, chains, mu2=mu2, **known) for mu2 in mu2s]
        for name in names
    ]
    ax = axes_for(ax, (6.4, 4.0))
    for colour, found in zip(cycle(COLOURS), plans, strict=False):
        effective = np.array([plan.effective_draws for plan in found])
        chosen = np.array([plan.form == "quadratic" for plan in found])
        noisy = any(plan.noise_sd > 0 for plan in found)
        worth = np.array([plan.error**-2.0 if noisy else np.nan for plan in found])
        for values, style, width, what in (
            (np.where(chosen, np.nan, effective), "-", 2.0, "effective draws"),
            (np.where(chosen, effective, np.nan), ":", 2.0, "of a normal approximation"),
            (worth, "--", 1.5, "worth, privacy noise included"),
        ):
            if not np.isnan(values).all():
                label = f"{found[0].sampler}: {what}"
                ax.plot(grid, values, style, color=colour, linewidth=width, label=label)
    drawn = np.concatenate([np.asarray(line.get_ydata()) for line in ax.get_lines()])
    low, high = 0.7 * np.nanmin(drawn), 1.3 * np.nanmax(drawn)
    label = f"budget: ε = {budget.epsilon:g}, δ = {budget.delta:g}"
    ax.vlines(budget.epsilon, low, high, color=LIMIT, linestyle="--", linewidth=1.0, label=label)
    left = budget.remaining().epsilon
    if grid[0] <= left < 0.99 * budget.epsilon:
        label = f"left of it: ε = {left:.3g}"
        ax.vlines(left, low, high, color=LIMIT, linewidth=1.0, label=label)
    log_x_axis(ax)
    ax.set_yscale("log")
    ax.set_xlabel(f"ε at δ = {budget.delta:g}")
    ax.set_ylabel("draws, all chains together")
    legend_above(ax, low, high)
    tidy(ax)
    return ax


def _model_of(given: Any) -> tuple[Model, PrivacyBudget]:
    if isinstance(given, PrivacyBudget):
        for model in MODELS:
            if get_budget(model) is given:
                return model, given
        raise ValueError("model is a budget whose model is gone; pass the model.")
    if not isinstance(given, Model):
        raise ValueError(
            f"model must be a PyMC model with a budget, or a budget; not {type(given).__name__}."
        )
    return given, require_budget(given, "dp.plot_effective_draws")
