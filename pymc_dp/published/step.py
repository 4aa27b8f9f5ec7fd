"""Step methods for published statistics: of the records, and of normal parameters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pymc.model import Model
from pymc.stats.convergence import SamplerWarning, WarningType
from pymc.util import get_random_generator, get_value_vars_from_user_vars
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors

from pymc_dp.base import compat as _compat
from pymc_dp.base.checks import check_integer
from pymc_dp.base.compat import CompiledStep
from pymc_dp.budget import get_budget
from pymc_dp.errors import NotFactorizable, UnsafeModel
from pymc_dp.published.innovations import NonCentred
from pymc_dp.published.proposals import (
    Crank,
    Enumerate,
    Offers,
    Prior,
    Proposal,
    Soma,
    Written,
)
from pymc_dp.published.reading import (
    Function,
    Reading,
    State,
    check_records,
    names,
    placed,
    read,
    records_of,
)
from pymc_dp.records.ancestry import array_of
from pymc_dp.records.graph import ParameterVector

_PROPOSALS: dict[str, Callable[[Reading], Offers]] = {
    "prior": Prior,
    "pcn": Crank,
    "enumerate": Enumerate,
    "soma": Soma,
}
_LARGE = 2**28  # bytes of stored records above which the user is warned
_FEW_DRAWS = 100.0  # below which a parameter is said to mix badly
_FULL = 0.001  # fraction of iterations with all records above which the user is warned
_MANY = 0.1  # fraction of iterations without non-centred moves above which the user is warned
_REFRESH = 64  # iterations after which sums that were kept up to date are computed again
_STARTS = 100  # a start is sought among so many draws from the model
_TRIALS = 3  # parameters at which a conditional distribution is compared with a normal one


class PrivacyAwareGibbs(CompiledStep):
    """Imputes confidential records, given the parameters and what was published about them.

    The model declares confidential records as free variables and published statistics as releases
    (:func:`pymc_dp.LaplaceRelease` and others).  This step updates the records, PyMC's own (NUTS by
    default) the parameters.  Together they sample their exact posterior given the releases.

    Parameters
    ----------
    vars : list of variables, optional
        The records: free variables with one row per record, discrete or continuous, (n,) or (n, k).
        Also their number, where it is confidential: a scalar integer variable that enters through
        :func:`pymc_dp.present`.  Default: all variables with one row per record on which a release
        depends, and discrete ones that were reported one by one.
    proposal : {"prior", "pcn", "enumerate", "soma"} or callable, default "prior"
        How records are offered new values:

        - "prior": drawn from the model given the parameters (Ju et al. 2022, Algorithm 1);
        - "pcn": autoregressive in the records' normal scores, with a correlation learned while
          the chain tunes; for releases so precise that "prior" is rarely accepted;
        - "enumerate": drawn from the full conditional distribution; discrete records;
        - "soma": one offer to all records at once (Xiong & Ju 2025); exchangeable records;
        - a callable ``proposal(current, parameters)`` that takes dicts of tensors by name and
          returns the proposed records by name and (n,) values of log q(current | proposed) -
          log q(proposed | current), both in PyTensor.
    noncentered : "auto", bool, or list of variables, default "auto"
        Also move the parameters with the records' innovations held fixed
        (``pymc_dp.published.innovations``): for which records.  "auto": where possible, also for
        records of other steps that depend on these parameters.  Otherwise parameters of vague
        releases mix slowly, since n imputed records hold them in place.
    moves : int, default 2
        How many such moves follow a sweep; each costs about six evaluations of all records.
    store_records : bool, default False
        Whether the result of :func:`pymc_dp.sample` keeps the records.  Plain ``pm.sample`` keeps
        all free variables unless told with ``var_names``.
    model : pymc.Model, optional
        Default: the model of the context.
    rng : optional
        As in PyMC.
    compile_kwargs, initial_point, blocked
        For PyMC; records always move together.

    Raises
    ------
    UnsafeModel
        If the model has a budget: its data are confidential, not published.
    NotFactorizable
        If a release is not a function of sums over records, a record's row depends on other
        records, or nothing was published about the records.
    ValueError
        If an argument is not usable, or the variables of the records differ in length.

    Notes
    -----
    *Assumptions.*  The mechanism is known, records are independent given the parameters, and the
    statistic of one record depends on that record alone (checked on draws from the model).

    *Guarantee.*  Every move leaves the posterior of parameters and records invariant.  For a
    release that is epsilon-private under replacement the acceptance probability of "prior" is
    never below exp(-epsilon) (Proposition 3.1); under add/remove privacy with known n, never below
    exp(-2 epsilon).  Nothing private is used: what was published stays as private as it was.

    *Weaknesses.*  A sweep visits all n records.  Records without known innovations (mixtures,
    truncated distributions) stay while the parameters move.  Sums of rows are floating-point
    numbers: clamp entries that may exceed 1e150 in size.

    Statistics per draw: ``dp_acceptance`` (part of the records that moved), ``dp_min_log_alpha``
    (smallest log acceptance probability), ``dp_drift`` (rounding error of the running sum).
    """

    name = "privacy_aware_gibbs"
    _shown: Mapping[str, tuple[str, str]] = {
        "dp_acceptance": ("Moved", ".2f"),
        "dp_min_log_alpha": ("Min log α", ".2f"),
    }
    stats_dtypes_shapes: dict[str, Any] = {  # noqa: RUF012 - PyMC reads it from the class
        "dp_acceptance": (np.float64, []),
        "dp_min_log_alpha": (np.float64, []),
        "dp_drift": (np.float64, []),
        "warning": (SamplerWarning, None),
    }
    _made = ("offers", "noncentred", "_log_counts", "_state")

    def __init__(
        self,
        vars: Sequence[Variable | str] | None = None,
        *,
        proposal: str | Proposal = "prior",
        noncentered: str | bool | Sequence[Any] = "auto",
        moves: int = 2,
        store_records: bool = False,
        model: Model | None = None,
        rng: Any = None,
        compile_kwargs: dict[str, Any] | None = None,
        initial_point: Any = None,
        blocked: bool = True,
    ) -> None:
        model = pm.modelcontext(model)
        if get_budget(model) is not None:
            raise UnsafeModel(
                "PrivacyAwareGibbs is for models of published statistics, which need no "
                "PrivacyBudget; this model has one, for records of its own."
            )
        if not (proposal in _PROPOSALS if isinstance(proposal, str) else callable(proposal)):
            raise ValueError(
                f"proposal must be one of {sorted(_PROPOSALS)}, or a callable, not {proposal!r}."
            )
        latents, count = _variables(model, vars)
        self.reading: Reading = read(model, latents, count)
        self._exchangeable = check_records(self.reading)
        if proposal == "soma" and not self._exchangeable:
            raise ValueError(
                "proposal='soma' needs exchangeable records, but these have covariates of their "
                "own. Use proposal='prior'."
            )
        self._proposal = proposal
        self._noncentered = _moved_along(noncentered, self.reading.all_records)
        self.store_records = store_records
        self.moves = check_integer("moves", moves, minimum=1)
        self._n_records = len(self.reading.latents)  # they come first in a state
        self._names = [v.name for v in self.reading.inputs]
        self.vars = [*self.reading.values]
        if count is not None:
            self.vars.append(model.rvs_to_values[count])
        self.rng = get_random_generator(rng)
        self._compile()

    def _compile(self) -> None:
        reading = self.reading
        if isinstance(self._proposal, str):
            self.offers = _PROPOSALS[self._proposal](reading)
        else:
            self.offers = Written(reading, self._proposal)
        self.noncentred: NonCentred | None = None
        self._centred = "noncentered=False"  # why there are no moves
        if self._noncentered is not False:
            try:
                named = self._noncentered if isinstance(self._noncentered, list) else None
                self.noncentred = NonCentred(reading, named)
            except ValueError as error:
                if self._noncentered != "auto":
                    raise
                self._centred = str(error)
        self._log_counts = None
        if reading.count is not None:
            here = placed(reading.count, reading.constrained(reading.others))
            log_prior = pm.logp(here, pt.arange(reading.n + 1), warn_rvs=False)
            self._log_counts = Function(reading.inputs, [log_prior])
        self._begin()

    # -- the life of a chain --------------------------------------------------------------------

    def _begin(self) -> None:
        for v, before in self.reading.fixed:
            now = array_of(v)
            if not np.array_equal(now.shape if isinstance(before, tuple) else now, before):
                raise ValueError(
                    f"`{v.name or 'a shared array'}` was changed after the step was made. Only "
                    "what was observed may change, and not its shape: make the step again."
                )
        self.tune = True
        self._state: State | None = None
        self._seen: list[np.ndarray] = []
        self._iterations = self._full = self._far = 0
        self._drift = 0.0
        self.offers.begin(self.rng)
        if self.noncentred is not None:
            self.noncentred.forget()

    def step(self, point: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[Any]]:
        """One sweep over all records, and `moves` moves of the parameters with innovations held."""
        state = self._current(point)
        acceptance, lowest = self.offers(state, self.rng)
        if self.tune and isinstance(self.offers, Crank):
            self.offers.adapt(acceptance)
        if self._log_counts is not None:
            self._move_count(state)
        if self._iterations % _REFRESH == 0:
            self._drift = state.refresh()
        if self.noncentred is not None:
            if self.tune:
                self.noncentred.learn(state)
            self._far += not all(self.noncentred(state, self.rng) for _ in range(self.moves))
        self._state = state
        self._iterations += 1
        point = {**point, **dict(zip(self._names, state.point, strict=True))}
        for name in self._names[: self._n_records]:  # they change in place
            point[name] = point[name].copy()
        trouble = self._trouble(state)
        stats = {
            "dp_acceptance": acceptance,
            "dp_min_log_alpha": float(lowest),
            "dp_drift": self._drift,
            "warning": trouble and SamplerWarning(WarningType.CONVERGENCE, trouble, "warn"),
        }
        return point, [stats]

    def _current(self, point: dict[str, np.ndarray]) -> State:
        """The state of the chain at a point; its rows are kept while the records stay."""
        values = [np.asarray(point[name]) for name in self._names]
        n_present, r = self.reading.n, self._n_records
        if self.reading.count is not None:
            n_present = int(np.clip(point[self.vars[-1].name], 0, n_present))
        mine = self._state
        if mine is not None and self.reading.local is None and mine.n_present == n_present:
            if [x.tobytes() for x in mine.point[:r]] == [x.tobytes() for x in values[:r]]:
                mine.point[r:] = values[r:]
                return mine
        state = self.offers.state(values, n_present)
        return self._possible(state) if mine is None else state

    def _possible(self, state: State) -> State:
        """The state, or else records from the model under which what was published is possible."""
        prior, found = self.offers, state
        for _ in range(1 + _STARTS):
            if math.isfinite(self.offers.density(found.total)) and np.isfinite(found.local).all():
                return found
            if not isinstance(prior, Prior):
                prior = Prior(self.reading)
                prior.begin(self.rng)
            values, _, _ = prior.draw(state, self.rng)
            found = self.offers.state([*values, *state.point[len(values) :]], state.n_present)
        raise ValueError(
            f"What was published is impossible under {_STARTS} sets of records drawn from the "
            "model at the start. Check the observed values and the noise of the releases, or give "
            f"records under which they are possible: initvals={{{names(self.reading.latents)}: "
            "...}."
        )

    def _move_count(self, state: State) -> None:
        n, r = self.reading.n, self._n_records
        order = np.arange(n)
        assert self._log_counts is not None
        state.n_present = int(
            self.offers.births_and_deaths(
                state.rows,
                state.total,
                np.ascontiguousarray(self._log_counts(*state.point)[0], dtype=float),
                state.n_present,
                self.rng.random((2 * math.isqrt(n) + 4, 3)),
                self._exchangeable,
                order,
            )
        )
        state.point[:r] = [v[order] for v in state.point[:r]]
        state.local = state.local[order]
        count = self.reading.inputs.index(self.vars[-1])
        state.point[count] = np.asarray(state.n_present, dtype=state.point[count].dtype)

    # -- what it says ---------------------------------------------------------------------------

    def _trouble(self, state: State) -> str | None:
        """At the end: parameters that mix badly, or too few places, and what would help."""
        count, n = self.reading.count, self.reading.n
        self._full += count is not None and state.n_present == n
        if self._planned is None:
            return None
        if self.noncentred is None:
            self._seen.append(np.hstack([0.0, *map(np.ravel, state.point[self._n_records :])]))
        if self._iterations != self._planned:
            return None
        if count is not None and self._full > _FULL * self._planned:
            return (
                f"`{count.name}` reached the capacity of {n} records in {self._full} of "
                f"{self._planned} iterations; larger numbers are never visited. Give the records "
                "more rows."
            )
        if self._far > _MANY * self._planned:
            return (
                "Records lay so far in a tail of their distribution that non-centred moves were "
                f"not made in {self._far} of {self._planned} iterations, and mixing depends on "
                "the rest. A distribution of the records with heavier tails may fit better."
            )
        if len(self._seen) < 100:
            return None
        kept = np.array(self._seen[len(self._seen) // 2 :], dtype=float)[None]
        moving = kept.std(axis=(0, 1)) > 0
        fewest = float(np.min(_compat.effective_draws(kept[:, :, moving]), initial=np.inf))
        if fewest * 2 * 1000 / self._planned >= _FEW_DRAWS:
            return None
        return (
            f"A parameter has about {2 * fewest:.0f} effective draws in {self._planned}: imputed "
            "records hold it in place. Non-centred moves, which would move them together, are "
            f"off: {self._centred}"
        )

    def _about_to_sample(self, call: _compat.SampleCall | None) -> None:
        super()._about_to_sample(call)
        if call is None:
            return
        stored = {getattr(v, "name", v) for v in call.var_names or ()}
        sizes = {
            rv.name: x.nbytes
            for rv, x in zip(self.reading.latents, self.reading.at_the_start, strict=False)
            if call.var_names is None or rv.name in stored
        }
        size = sum(sizes.values()) * (call.draws + call.tune) * call.chains
        if size > _LARGE and not self.store_records:
            kept = [rv.name for rv in self.reading.others]
            warnings.warn(
                f"Storing {', '.join(f'`{name}`' for name in sizes)} takes about "
                f"{size / 2**30:.1f} GiB of memory. Keep the parameters only: "
                f"pm.sample(..., var_names={kept}), or dp.sample, which does so.",
                UserWarning,
                stacklevel=3,
            )


def _variables(
    model: Model, given: Sequence[Variable | str] | None
) -> tuple[list[Variable], Variable | None]:
    """The records, and the number of records, among the variables of the user."""
    if given is None:
        if published := records_of(model):
            return published, None
        raise NotFactorizable(
            "Nothing that was published about records was found in the model. Declare it "
            "(dp.LaplaceRelease and others), or name the records: dp.PrivacyAwareGibbs([x, y])."
        )
    if isinstance(given, Variable | str):
        given = [given]
    known = {value: rv for rv, value in model.rvs_to_values.items()}
    known |= {rv.name: rv for rv in model.free_RVs}
    found = [known.get(v, v) for v in given]
    wrong = [getattr(v, "name", v) for v in found if v not in model.free_RVs]
    if wrong:
        raise ValueError(
            f"{wrong} are not free random variables of the model; those are "
            f"{[rv.name for rv in model.free_RVs]}."
        )
    counts = [v for v in found if v.type.ndim == 0 and v.type.dtype.startswith("int")]
    records = [v for v in found if v not in counts]
    if len(counts) > 1 or not records:
        raise NotFactorizable(
            "Name the variables of the records, and at most one scalar integer variable, the "
            f"number of records; got {[v.name for v in found]}."
        )
    return records, counts[0] if counts else None


def _moved_along(noncentered: Any, latents: Sequence[Variable]) -> list[Variable] | bool | str:
    """The argument `noncentered`, with variables for their names."""
    if isinstance(noncentered, bool) or (isinstance(noncentered, str) and noncentered == "auto"):
        return noncentered
    named = {rv.name: rv for rv in latents}
    single = isinstance(noncentered, Variable | str)
    found = [named.get(v, v) for v in ([noncentered] if single else noncentered)]
    if not found or not all(v in latents for v in found):
        raise ValueError(
            "noncentered must be 'auto', True, False, or a list of variables that hold records; "
            f"those are {sorted(named)}."
        )
    return found


class ConjugateNormal(CompiledStep):
    """Draws parameters from their conditional distribution, where that is normal.

    For coefficients with normal priors that enter the mean of normal records linearly; other steps
    (``dp.PrivacyAwareGibbs``) move the other variables.  Far cheaper than NUTS, and without tuning.

    Parameters
    ----------
    vars : list of variables
        Continuous parameters without transforms, drawn jointly.
    model : pymc.Model, optional
        Default: the model of the context.
    rng : optional
        As in PyMC.
    compile_kwargs, initial_point, blocked
        For PyMC.

    Raises
    ------
    ValueError
        If the log-density of the model is not quadratic in these parameters.

    Notes
    -----
    *Guarantee.*  The draw is exact up to rounding: the gradient of a quadratic log-density is
    linear, so d + 1 gradients give it all.  That it is quadratic is checked at random points when
    the step is built, and where each chain starts.

    *Weaknesses.*  One draw takes d + 1 gradients, each over all records.
    """

    name = "conjugate_normal"
    stats_dtypes_shapes: dict[str, Any] = {}  # noqa: RUF012 - PyMC reads it from the class
    _made = ("_function",)

    def __init__(
        self,
        vars: Sequence[Variable],
        *,
        model: Model | None = None,
        rng: Any = None,
        compile_kwargs: dict[str, Any] | None = None,
        initial_point: Any = None,
        blocked: bool = True,
    ) -> None:
        model = pm.modelcontext(model)
        self.vars = get_value_vars_from_user_vars(vars, model)
        for value in self.vars:
            rv = model.values_to_rvs[value]
            if not value.type.dtype.startswith("float"):
                raise ValueError(f"ConjugateNormal: `{rv.name}` is discrete.")
            if model.rvs_to_transforms[rv] is not None:
                raise ValueError(
                    f"ConjugateNormal: `{rv.name}` has bounds, so its conditional distribution is "
                    "not normal. Leave it to NUTS."
                )
        start = model.initial_point()
        self.vector = ParameterVector.of(self.vars, [np.shape(start[v.name]) for v in self.vars])
        self.rest = [v for v in model.value_vars if v not in self.vars]
        self.rng = get_random_generator(rng)
        terms = self.vector.substitute(model.logp(sum=False))
        # the others, among them densities of releases, are constants
        depend = [term.sum() for term in terms if self.vector.theta in ancestors([term])]
        log_density = sum(depend[1:], depend[0])
        gradient = pytensor.grad(log_density, self.vector.theta, disconnected_inputs="ignore")
        self._graphs = [gradient, log_density.astype("float64")]
        self._compile()
        rng = np.random.default_rng(11)
        for _ in range(_TRIALS):
            rest = [np.asarray(start[v.name]) for v in self.rest]
            moved = [rng.standard_normal(x.shape) * (x.dtype.kind == "f") for x in rest]
            self._check([(x + m).astype(x.dtype) for x, m in zip(rest, moved, strict=True)])

    def _compile(self) -> None:
        self._function = Function([self.vector.theta, *self.rest], self._graphs)
        self._begin()

    def _begin(self) -> None:
        self._checked = False

    def step(self, point: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[Any]]:
        """One draw."""
        rest = [np.asarray(point[v.name]) for v in self.rest]
        if not self._checked:
            self._check(rest)
            self._checked = True
        law = self._normal(rest)
        at_zero, precision, _ = law
        lower = np.linalg.cholesky(0.5 * (precision + precision.T))
        half = np.linalg.solve(lower, at_zero) + self.rng.standard_normal(self.vector.size)
        theta = np.linalg.solve(lower.T, half)
        self._verify(theta, rest, law, 1e-3)
        return {**point, **self.vector.point(theta)}, [{}]

    def _normal(self, rest: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, float]:
        """Gradient at 0, precision, and log-density at 0, if the log-density is quadratic."""
        at_zero, level = self._function(np.zeros(self.vector.size), *rest)
        at_zero = np.array(at_zero)
        units = np.eye(self.vector.size)
        precision = np.array([at_zero - self._function(unit, *rest)[0] for unit in units])
        return at_zero, precision, float(level)

    def _check(self, rest: Sequence[np.ndarray]) -> None:
        law, rng = self._normal(rest), np.random.default_rng(11)
        for theta in rng.standard_normal((_TRIALS, self.vector.size)):
            self._verify(theta, rest, law, 1e-6)

    def _verify(
        self,
        theta: np.ndarray,
        rest: Sequence[np.ndarray],
        law: tuple[np.ndarray, np.ndarray, float],
        error: float,
    ) -> None:
        """Gradient and log-density are those of the normal distribution, but for an `error`."""
        at_zero, precision, level = law
        gradient, log_density = self._function(theta, *rest)
        with np.errstate(invalid="ignore"):
            rise = float(at_zero @ theta - 0.5 * theta @ precision @ theta)
            jump = abs(float(log_density) - level - rise)
            terms = 1.0 + abs(level) + abs(float(log_density)) + abs(float(at_zero @ theta))
            bend = np.abs(gradient - (at_zero - precision @ theta))
            sizes = np.abs(at_zero) + np.abs(precision) @ np.abs(theta)
            # a standard deviation's worth of gradient in each direction is the least that counts
            least = error * np.sqrt(np.abs(np.diag(precision)))
            normal = jump <= error + 1e-9 * terms and (bend <= least + 1e-9 * sizes).all()
        if not normal:
            raise ValueError(
                f"ConjugateNormal: the model is not normal in {[v.name for v in self.vars]} given "
                "everything else: their priors must be normal, and they must enter means of "
                "normal variables linearly. Leave them to NUTS."
            )
