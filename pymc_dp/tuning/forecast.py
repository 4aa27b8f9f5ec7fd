"""What a budget will buy, before anything is spent: arithmetic on public numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import numpy as np
from pymc.model import Model

from pymc_dp.base.checks import check_integer, check_share, counted
from pymc_dp.budget import PrivacyBudget, get_budget, model_of, name_of, require_budget
from pymc_dp.errors import BudgetExceeded, UnsafeModel
from pymc_dp.privacy.accounting import MU2_UNIT, epsilon_from_mu, mu_from_budget
from pymc_dp.rows.contributions import Norms, score_norms

ROOM = 1.1  # room for what is given back to a clipped score, in units of its norm
_WRONG = 0.15  # part of what is clipped that is not given back where the model is wrong

SCORE = 3.5  # norm of nearly all scores where the posterior is whitened, in units of sqrt(d/n)
_CHANGE = 6.0  # norm of nearly all changes of a score over the posterior, in units of d/n
#: Norm of 99 % of the scores, as `SCORE`, and of nearly all their projections, in 1/sqrt(n).
_KICK, PROJECTION = 2.5, 4.5
_FOUND = 1.15  # noise of a run over that with the best clip norm and coordinates
_ADDED = 0.8  # what the quadratic form adds to the noise, over its square; fitted to eight models
_ANCHOR, _CHAINS = 0.7, 0.8  # parts of the budget for an anchored score, for other chains
WORTH = 0.86  # effective draws per squared mu of a score of bound 1/2 as friction, on N(0, I)
SAMPLERS = ("DPLangevin", "DPHMC", "DPPenalty")
"""Step methods that have a forecast."""
_FEWEST, _MOST = 50, {"DPHMC": 1000, "DPPenalty": 4000}  # draws that "auto" chooses: least, most
#: Noise of a score, in units of sqrt(n/d) posterior sds (priors are about half as wide), that hides
#: what n/d records tell of a parameter. Groups and Rasch models kept 0.7 to 1.0 of the width of the
#: prior at 0.25 and above; regressions of ten slopes 0.15 to 0.45 at 0.23, and 0.9 at 0.6.
_HIDES = 0.24
WIDE, LEAST = 0.6, 200.0  # most noise of an anchor, in posterior sds; least effective draws
#: Most parameters with a whole curvature in any case; else most entries for all records.
_FULL, _ENTRIES = 60, 2e9
CURVATURE = 0.24  # part of the budget that the curvature of the quadratic form has


@dataclass(frozen=True)
class Forecast:
    """What a plan can be expected to give, if the posterior is near normal.

    `n` counts privacy units, `d` parameters. `epsilon` and `delta` are what is left of the budget.

    - `form`: what DPLangevin will probably do: "anchored" or "quadratic"; else "chains".
    - `noise_multipliers`: about what each mechanism will get.
    - `noise_sd`, `monte_carlo_error`: in the posterior mean, in posterior standard deviations.
    - `effective_draws`: of all chains together.
    - `diagonal`: whether noise will hide how parameters depend on each other, so that intervals of
      their sums and means will be too narrow.
    """

    sampler: str
    draws: int
    tune: int
    chains: int
    n: int
    d: int
    epsilon: float
    delta: float
    form: str
    noise_multipliers: dict[str, float]
    noise_sd: float
    effective_draws: float
    monte_carlo_error: float
    diagonal: bool
    advice: str

    @property
    def enough(self) -> bool:
        """Whether the result will be more than mostly noise."""
        return self.error <= (1.0 if self.form != "chains" else 1.0 / 3.0)

    @property
    def error(self) -> float:
        """Expected error of the posterior mean, in posterior standard deviations."""
        return math.hypot(self.noise_sd, self.monte_carlo_error)

    def __str__(self) -> str:
        noise = ", ".join(f"{name} {value:.3g}" for name, value in self.noise_multipliers.items())
        few = self.effective_draws < 10
        worth = f"{self.effective_draws:{'.2g' if few else ',.0f'}}"
        lines = [
            f"{self.sampler} ({self.form}), epsilon = {self.epsilon:.3g}, delta = "
            f"{self.delta:.3g}, n = {self.n:,}, d = {self.d}: {counted(self.chains, 'chain')} of "
            f"{counted(self.draws, 'draw')} after {counted(self.tune, 'tuning iteration')}.",
            f"Noise multipliers: {noise}.",
            f"Privacy noise in the posterior mean: {self.noise_sd:.2g} posterior sds.",
            f"Effective draws: about {worth}; Monte-Carlo error of the mean "
            f"{self.monte_carlo_error:.2g} posterior sds.",
            self.advice,
        ]
        if self.form == "chains":  # the noise is in how few draws these are worth
            del lines[2]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For notebooks."""
        return "".join(f"<p>{escape(line)}</p>" for line in str(self).splitlines())


def forecast_of(
    budget: PrivacyBudget,
    sampler: str,
    draws: int | str,
    tune: int,
    chains: int,
    *,
    d: int,
    mu2: float,
    whole: float | None = None,
    norms: Norms | None = None,
) -> Forecast:
    """What a part of a budget, the squared `mu2`, buys for `d` parameters; ValueError names the
    argument.

    `whole` is the squared mu of which this is a part. `draws` "auto": as many as the budget should
    be cut into. `norms` are those of scores under the
    model; by default of a light tail.
    """
    n, delta, sensitivity = budget.n_public, budget.delta, budget.sensitivity
    if sampler not in SAMPLERS:
        raise ValueError(f"step must be one of {sorted(SAMPLERS)}, got {sampler!r}.")
    chains = check_integer("chains", chains, minimum=1)
    tune = check_integer("tune", tune, minimum=0)
    if draws != "auto":
        draws = check_integer("draws", draws, minimum=1)
    noise = sensitivity * SCORE * math.sqrt(d / n) / math.sqrt(_ANCHOR * mu2)  # of score sums
    noise_sd, form = 0.0, "chains"
    if sampler == "DPLangevin":
        noise_sd = noise if norms is None else _clipped_noise(norms, n, d, mu2, sensitivity)
        worth = WORTH * 0.25 * mu2 / (sensitivity * _CHANGE * d / n) ** 2
        form = "anchored" if noise_sd < WIDE and worth > LEAST else "quadratic"
        if form == "quadratic" and norms is not None:
            noise_sd *= 1.0 + _ADDED * noise_sd
        draws = 1000 if draws == "auto" else draws
        effective = 0.5 * chains * int(draws)
        effective = effective if form == "quadratic" else min(effective, worth)
    else:
        # squared distance over which all ratios together have noise variance 1: `random_walk`
        bounds = PROJECTION + (_KICK * math.sqrt(d / 2.0) if sampler == "DPHMC" else 0.0)
        jumps = _CHAINS * mu2 * n / (sensitivity * bounds) ** 2
        if draws == "auto":
            # a walk with four times as many iterations comes to 80 % of what the budget is worth,
            # trajectories of half a sd per coordinate to all of it
            enough = 4.0 * jumps if sampler == "DPPenalty" else 23.0 * jumps / d
            draws = min(max(round(enough / chains), _FEWEST), _MOST[sampler])
        kept = chains * int(draws)
        effective = (
            0.33 * kept * jumps / (d * (kept + jumps))
            if sampler == "DPPenalty"
            else min(0.33 * jumps / d, 0.3 * kept)
        )
    iterations = chains * (int(draws) + tune)
    error = 1.0 / math.sqrt(effective)
    hidden = n / d if noise > _HIDES * math.sqrt(n / d) else None
    multipliers = _multipliers(sampler, form, iterations, mu2)
    diagonal = form == "quadratic" and not whole_curvature(n, d, mu2)
    wrong = math.hypot(noise_sd, error)
    advice = _advice(wrong, noise_sd, effective, form, whole or mu2, delta, hidden)
    if diagonal and hidden is None:
        advice += (
            f" It hides how the {d} parameters depend on each other: intervals of their sums and "
            "means will be too narrow, and the result may be little more than the prior. Fewer "
            "parameters, more records or a larger epsilon would help."
        )
    return Forecast(
        sampler,
        int(draws),
        tune,
        chains,
        n,
        d,
        epsilon_from_mu(math.sqrt(mu2), delta),
        delta,
        form,
        multipliers,
        noise_sd,
        effective,
        error,
        diagonal,
        advice,
    )


def plan(
    self: PrivacyBudget,
    model: Model | None = None,
    draws: int | Literal["auto"] = 1000,
    tune: int = 0,
    chains: int = 4,
    step: Any = "DPLangevin",
    *,
    epsilon: float | None = None,
    share: float = 1.0,
) -> Forecast:
    """What the rest of the budget will buy; nothing is spent and no record is read.

    A model that cannot be sampled privately is refused with the errors of
    :func:`pymc_dp.sample`.

    Parameters
    ----------
    model : pymc.Model, optional
        Default: the model of the context.
    draws : int or "auto"
        "auto" chooses how many iterations the budget should be cut into.
    tune, chains : int
    step : class or name, default "DPLangevin"
        A private step method.
    epsilon : float, optional
        What this much, at the budget's delta, would buy instead.
    share : float, default 1
        Part of it that is used, as in :func:`pymc_dp.sample`.

    Returns
    -------
    Forecast
        Prints what to expect: noise multipliers, privacy noise in the posterior mean,
        effective draws, and what would help if the budget is too small.

    Raises
    ------
    BudgetExceeded, ValueError, UnsafeModel, NotFactorizable

    Notes
    -----
    Rules of thumb for a near-normal posterior with learned settings, from public things alone:
    n, the budget and the model. The norms of scores are simulated with made-up records, with
    normal features, at the initial point. Other models (several rows or outcomes of a record,
    group effects, more than 60 parameters) are taken to have scores of a light tail.
    """
    model = model_of(model)
    if get_budget(model) is not self:
        raise UnsafeModel("The budget belongs to another model than the one given.")
    require_budget(model, "budget.plan")
    # what the graph proves needs no numbers to check it, nor a private value
    records = self.records_of(model, check=False, read=False)
    share = check_share(share)
    if epsilon is None:
        info, mu2 = self.account.read(), self.remaining().gdp_mu2
        whole = info.cap / MU2_UNIT
        if info.remaining <= info.cap >> 20:  # what the integers of a used plan leave over
            closed = "was closed" if info.closed else "is used up"
            raise BudgetExceeded(
                f"The budget {closed}, so there is nothing to plan. epsilon= asks about another."
            )
    else:
        whole = mu2 = mu_from_budget(epsilon, self.delta) ** 2
    d, sampler = records.parameters.size, name_of(step)
    norms = score_norms(records) if sampler == "DPLangevin" else None
    part = share * mu2
    return forecast_of(self, sampler, draws, tune, chains, d=d, mu2=part, whole=whole, norms=norms)


PrivacyBudget.plan = plan


def costs_of_clipping(
    norms: np.ndarray, numbers: np.ndarray, bounds: np.ndarray, price: float
) -> tuple[np.ndarray, np.ndarray]:
    """Error and cost of (m,) clip norms b where what is clipped is given back on average.

    `numbers` units have the scores of the (k,) norms where the posterior is whitened; `price` is
    the noise variance of all entries of the sum together, for a bound of 1. With e_i =
    (norm_i - b)_+, the error is price (1.1 b)^2 + sum_i e_i^2; the second term is the covariance of
    what is clipped, if each is as far from its mean as from 0. The cost adds (0.15 sum_i e_i)^2,
    what is not given back where the model is wrong (4 to 20 % of the sum in examples).
    """
    beyond = np.maximum(norms - bounds[:, None], 0.0)
    error = price * (ROOM * bounds) ** 2 + np.maximum(beyond**2 @ numbers, 0.0)
    return error, error + (_WRONG * np.maximum(beyond @ numbers, 0.0)) ** 2


def _clipped_noise(norms: Norms, n: int, d: int, mu2: float, sensitivity: float) -> float:
    """Noise in the posterior mean, in its sds, root mean square, at the best clip norm."""
    lengths, parts = norms[0] / math.sqrt(n), n * norms[1]
    bounds = float(lengths.max()) * 2.0 ** (-np.arange(96) / 12.0)
    price = d * sensitivity**2 / (_ANCHOR * mu2)
    error, cost = costs_of_clipping(lengths, parts, bounds, price)
    return _FOUND * math.sqrt(float(error[int(np.argmin(cost))]) / d)


def whole_curvature(n: int, d: int, mu2: float) -> bool:
    """Whether the whole curvature of n records is released, and not its diagonal.

    `mu2` is that of the preparation. Curvatures of records have norms of about d/n where the sum is
    1, and a matrix of noise the norm sqrt(2 d). Item responses with 120 and 240 parameters were
    nearer to the truth with the whole matrix where the product was 0.2 to 0.8, and left with the
    prior at 1.3; the diagonal makes intervals of means of parameters too narrow.
    """
    noise = 2.0 * math.sqrt(2.0 * d) * d / n / math.sqrt(CURVATURE * mu2)  # of replaced records
    return d <= _FULL or (n * d * d / 2.0 < _ENTRIES and noise < 1.0)


def _multipliers(sampler: str, form: str, iterations: int, mu2: float) -> dict[str, float]:
    if form == "quadratic":
        return {"score": 1.0 / math.sqrt(_ANCHOR * mu2), "curvature": 1.0 / math.sqrt(0.17 * mu2)}
    if form == "anchored":
        return {
            "anchor": 1.0 / math.sqrt(_ANCHOR * mu2),
            "gradient": math.sqrt(4 * iterations / (0.05 * mu2)),
            "energy_error": math.sqrt(iterations / (0.02 * mu2)),
        }
    if sampler == "DPHMC":
        half = 0.5 * _CHAINS * mu2
        return {
            "gradient": math.sqrt(iterations / half),
            "log_ratio": math.sqrt(iterations / half),
        }
    return {"log_ratio": math.sqrt(iterations / (_CHAINS * mu2))}


def _advice(
    error: float,
    noise_sd: float,
    effective: float,
    form: str,
    whole: float,
    delta: float,
    hidden: float | None,
) -> str:
    """What to do about it, in words; `hidden` is the number of records per parameter."""
    wanted = 1.0 if form != "chains" else 1.0 / 3.0
    if error <= wanted:
        if form == "quadratic":
            return (
                "The privacy noise is a large part of the result, so the likelihood will be "
                "replaced by its normal approximation; dp.laplace gives about the same."
            )
        return "The budget is large enough for these data and this model."
    factor = (error / wanted) ** 2
    epsilon = epsilon_from_mu(math.sqrt(whole * factor), delta)
    if hidden is not None:
        first = (
            f"The budget buys next to nothing: the privacy noise hides what about "
            f"{_about(hidden)} records for each parameter tell, and the result will be little more "
            "than the prior. To "
        )
    elif form == "chains":
        first = f"About {effective:.2g} effective draws: to "
    else:
        first = f"The privacy noise is about {noise_sd:.1f} posterior sds (wide intervals): to "
    return first + (
        f"bring the error down to {wanted:.2g} posterior sds, raise the budget to epsilon = "
        f"{_about(epsilon)} or collect {_about(factor)}x the records, or use fewer parameters."
    )


def _about(number: float) -> str:
    """Two digits, without an exponent."""
    return f"{float(f'{number:.2g}'):,.{0 if number >= 9.95 else 1}f}"
