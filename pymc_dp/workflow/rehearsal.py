"""A run on made-up records, before any of the budget is spent on the real ones."""

from __future__ import annotations

import html
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
from pymc.model import Model

from pymc_dp.base import compat as _compat
from pymc_dp.base.checks import check_integer
from pymc_dp.base.columns import named
from pymc_dp.budget import get_budget, model_of, name_of, require_budget
from pymc_dp.errors import BudgetExceeded
from pymc_dp.publication.publish import statement_facts
from pymc_dp.reports.diagnostics import entries
from pymc_dp.reports.posteriors import plot_posterior_comparison
from pymc_dp.sampling import sample
from pymc_dp.steps.langevin import DPLangevin
from pymc_dp.tuning.forecast import SAMPLERS, Forecast
from pymc_dp.workflow.made_up import MadeUp

_NO_REFERENCE = (
    "There is nothing to compare with: this rehearsal was made with reference=False. Rehearse with "
    "reference=True, or compare with the `truth` in its table."
)
#: Probability of the intervals, as ArviZ has them.
_INTERVAL = 0.94


@dataclass
class Rehearsal:
    """What :func:`rehearse` found; all of it is about made-up records, and public.

    Attributes
    ----------
    table : pandas.DataFrame
        A row for each scalar parameter: the value that made the records (``truth``), ``mean`` and
        ``sd`` of the private posterior and of the reference (NUTS on the same records), ``error``
        (difference of the means) in sds of the reference, ``sd_ratio`` (private over reference),
        and whether the equal-tailed 94 % interval of the private posterior holds the truth
        (``covered``).
    forecast : Forecast or None
        What ``budget.plan`` had said of it; None of step methods without a forecast.
    seconds : dict of str to float
        Of the private run and of the reference.
    form : str
        Form that the step chose, or its name.
    warnings : list of str
        What the run warned of.
    assumed : list of str
        Features that were taken as standard normal, or as 0 and 1.
    released, reference : InferenceData or DataTree
        The result, as :func:`sample` returns it, and that of NUTS; `reference` is None without one.
    """

    table: pd.DataFrame
    forecast: Forecast | None
    seconds: dict[str, float]
    form: str
    warnings: list[str]
    assumed: list[str]
    released: Any
    reference: Any

    @property
    def error(self) -> float:
        """Root mean square error of the posterior means, in sds of the reference."""
        if self.reference is None:
            raise ValueError(_NO_REFERENCE)
        return float(np.sqrt(np.mean(self.table["error"] ** 2)))

    @property
    def coverage(self) -> float:
        """Part of the parameters whose interval holds the value that made the records."""
        return float(self.table["covered"].mean())

    def _lines(self) -> list[str]:
        table, budget = self.table, statement_facts(self.released)
        size = f"{budget['n_units']:,}" if budget["n_units"] else "as many as n_public says"
        lines = [
            f"Rehearsal on made-up records ({size}), epsilon = {budget['epsilon']:.3g}, "
            f"delta = {budget['delta']:.3g}: no private value was read, and nothing was spent.",
            f"{budget['sampler']} ({self.form}) took {self.seconds['private']:.1f} s"
            + (f", NUTS {self.seconds['reference']:.1f} s." if self.reference is not None else "."),
        ]
        if self.reference is not None:
            said = ""
            if self.forecast is not None:
                said = f"; the planner said {self.forecast.error:.2g}"
            lines.append(
                f"Error of posterior means: {self.error:.2g} posterior sds (root mean square over "
                f"{len(table)} parameters){said}. Intervals are "
                f"{table['sd_ratio'].median():.2g} times as wide as without privacy (median)."
            )
        lines.append(
            f"94 % intervals hold the value that made the records for {table['covered'].sum()} of "
            f"{len(table)} parameters."
        )
        if self.assumed:
            lines.append(
                "Taken as standard normal, or as 0 and 1 if of whole numbers: "
                f"{', '.join(sorted(set(self.assumed)))}. Give public examples, data={{...}}, or "
                "bounds for made-up features that are more like yours."
            )
        lines += [f"Warning: {text}" for text in self.warnings]
        return lines

    def __repr__(self) -> str:
        return "\n".join([*self._lines(), self.table.round(3).to_string(max_rows=20)])

    def _repr_html_(self) -> str:
        said = "".join(f"<p>{html.escape(line)}</p>" for line in self._lines())
        return said + self.table.round(3).to_html(max_rows=20)

    def plot(self, var_names: str | Sequence[str] | None = None, **kwargs: Any) -> np.ndarray:
        """The private posterior of the made-up records beside the one without privacy.

        Parameters
        ----------
        var_names : str or sequence of str, optional
        **kwargs
            For :func:`plot_posterior_comparison`.

        Returns
        -------
        (k,) array of matplotlib.axes.Axes

        Raises
        ------
        ValueError
            If there is no reference.
        """
        if self.reference is None:
            raise ValueError(_NO_REFERENCE)
        labels = "private, made-up records", "NUTS, the same records"
        return plot_posterior_comparison(
            self.released, self.reference, var_names, **{"labels": labels, **kwargs}
        )


def rehearse(
    model: Model | None = None,
    draws: Any = 1000,
    *,
    tune: int | None = None,
    chains: int = 4,
    step: Any = DPLangevin,
    step_kwargs: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    at: Mapping[str, Any] | None = None,
    rows_per_unit: int = 2,
    reference: bool = True,
    random_seed: int | None = None,
    **kwargs: Any,
) -> Rehearsal:
    """Make the call of :func:`sample` on made-up records, as often as you like.

    Parameters are chosen from the prior, as many records as there are units are simulated with
    them, and sampled privately with a throw-away budget of the epsilon that is left. NUTS samples
    the same records without privacy.

    Parameters
    ----------
    model : pymc.Model, optional
        With its budget.  Default: the model of the context.
    draws, tune, chains, step, step_kwargs
        As for :func:`sample`; `step` as a class or a name.
    data : mapping of str to array, optional
        Public examples of features by name of their ``pm.Data``, records on the first axis, any
        number of rows.  Other features are uniform within their :func:`bounds`, labels of groups
        uniform over all groups, others standard normal, or 0 and 1 if they are whole numbers (the
        result says so); public data are used as they are.
    at : mapping of str to array, optional
        Values of free variables that make the records.  Default: half-way, on the unconstrained
        scale, between the median of the prior and a draw of it, cut to the central 80 %: wide
        priors allow records that nobody expects.
    rows_per_unit : int, default 2
        Rows of each unit if the budget has a ``privacy_unit``; how many the real ones have is
        private.
    reference : bool, default True
        Whether to sample the same records with NUTS, which takes longer than the private run.
    random_seed : int, optional
        For the records, proposals and NUTS; never for privacy noise.
    **kwargs
        As for :func:`sample` (``cores``, ``progressbar``, ...).

    Returns
    -------
    Rehearsal

    Raises
    ------
    UnsafeModel
        If the model has no budget, or a ``pm.CustomDist`` may hold private data.
    BudgetExceeded
        If nothing is left of the budget.
    ValueError
        If an argument is not usable, or the model cannot be simulated.

    Notes
    -----
    *Guarantee.*  A function of the model, the public arguments, the number of units where it is
    public, and the shapes of a row: no value of a private array is read, and nothing is charged.

    *Assumptions.*  `data` and `at` are public.

    *Weaknesses.*  Made-up records come from the model: clipping of real records that it does not
    expect is not seen.  Features are independent of each other unless `data` says otherwise.  One
    rehearsal shows one data set; errors of few parameters vary by chance.
    """
    model = model_of(model)
    budget = require_budget(model, "dp.rehearse")
    rows_per_unit = check_integer("rows_per_unit", rows_per_unit, minimum=1)
    if not isinstance(step, type | str):
        raise ValueError(
            "step must be a class or a name: a step that was built is for the real records."
        )
    left = budget.remaining().epsilon
    if not left > 0.0:
        raise BudgetExceeded("Nothing is left of the budget, so there is nothing to rehearse.")
    rng = np.random.default_rng(random_seed)
    data, at = (named({} if given is None else given) for given in (data, at))
    if not isinstance(data, Mapping) or not isinstance(at, Mapping):
        raise ValueError("data and at must be dicts of values by name.")
    made = MadeUp.of(model, budget, data, at, rows_per_unit, rng)
    private = made.with_budget(left)
    own = get_budget(private)
    assert own is not None
    forecast: Forecast | None = None
    if name_of(step) in SAMPLERS:
        forecast = own.plan(private, draws, tune or 0, chains, step, share=kwargs.get("share", 1.0))
    if names := kwargs.get("var_names"):  # the table has all parameters
        names = [names] if isinstance(names, str) else names
        kwargs["var_names"] = list(dict.fromkeys([*made.truth, *names]))
    seed = int(rng.integers(2**31))
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            begin = time.perf_counter()
            released = sample(
                draws,
                tune=tune,
                chains=chains,
                step=step,
                step_kwargs=step_kwargs,
                model=private,
                random_seed=seed,
                **kwargs,
            )
            seconds = {"private": time.perf_counter() - begin}
    finally:
        own.account.close()
    other = None
    if reference:
        begin = time.perf_counter()
        cores = min(2, kwargs.get("cores") or 2)
        other = _nuts(made.build(), seed, cores, bool(kwargs.get("progressbar", True)))
        seconds["reference"] = time.perf_counter() - begin
    facts = statement_facts(released)
    return Rehearsal(
        table=_compared(made.truth, released, other),
        forecast=forecast,
        seconds=seconds,
        form=str(facts["settings"].get("form", facts["sampler"])),
        warnings=_of_the_run(said),
        assumed=made.assumed,
        released=released,
        reference=other,
    )


def _of_the_run(said: Sequence[warnings.WarningMessage]) -> list[str]:
    """Texts of warnings for users, each once."""
    return list(dict.fromkeys(str(w.message) for w in said if w.category is UserWarning))


def _nuts(model: Model, seed: int, cores: int, progressbar: bool) -> Any:
    """What NUTS draws, without privacy."""
    return pm.sample(
        chains=2,
        cores=cores,
        model=model,
        var_names=[rv.name for rv in model.free_RVs],
        random_seed=seed,
        progressbar=progressbar,
        compute_convergence_checks=False,
        **_compat.quick_gradients(),
    )


def _compared(truth: Mapping[str, np.ndarray], released: Any, reference: Any) -> pd.DataFrame:
    """A row for each scalar parameter."""
    posterior = _compat.group(released, "posterior")
    other = None if reference is None else _compat.group(reference, "posterior")
    tail = (1.0 - _INTERVAL) / 2.0
    rows: dict[str, dict[str, Any]] = {}
    for name, value in truth.items():
        references = iter(()) if other is None else entries(other[name])
        for (label, draws), true in zip(entries(posterior[name]), np.ravel(value), strict=True):
            low, high = np.quantile(draws, [tail, 1.0 - tail])
            row = {"truth": float(true), "mean": draws.mean(), "sd": draws.std()}
            if other is not None:
                _, without = next(references)
                sd = without.std()
                row |= {
                    "reference_mean": without.mean(),
                    "reference_sd": sd,
                    "error": (draws.mean() - without.mean()) / sd,
                    "sd_ratio": draws.std() / sd,
                }
            rows[label] = {**row, "covered": bool(low <= true <= high)}
    return pd.DataFrame.from_dict(rows, orient="index")
