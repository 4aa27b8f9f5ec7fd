"""The penalty method for exponential families as a PyMC step: its cost does not grow with n."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pymc.model import Model
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors

from pymc_dp.base.checks import warn
from pymc_dp.base.matrices import Coordinates
from pymc_dp.errors import UnsafeModel
from pymc_dp.kernels import penalty
from pymc_dp.kernels.penalty import GaussianProposal
from pymc_dp.privacy.chains import Queries, StatisticQueries
from pymc_dp.privacy.holder import at_last_two
from pymc_dp.records.ancestry import data_behind
from pymc_dp.records.bounds import Interval, known_limits
from pymc_dp.records.extraction import refuse_private
from pymc_dp.records.units import RecordStore, public_inputs
from pymc_dp.rows.contributions import Statistic
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import compile_function, compile_parameter_function, jacobian_of
from pymc_dp.rows.groups import RowGroup
from pymc_dp.rows.record_statistics import RowByRow, widened
from pymc_dp.steps.base import PrivateStep
from pymc_dp.steps.families import Family, family_of, with_count
from pymc_dp.steps.settings import step_sizes
from pymc_dp.tuning.coordinates import Start, prepare_statistic, random_walk
from pymc_dp.tuning.model_parts import Design, ModelParts
from pymc_dp.tuning.preparing import Preparing
from pymc_dp.tuning.releases import Shares

_FEW = 10.0  # fewer effective draws than that are worth a warning


class ExponentialFamilyPenalty(PrivateStep):
    """Random-walk Metropolis on noisy sufficient statistics (the penalty method).

    For records that are independent and identically distributed given the parameters, in an
    exponential family: Normal, Bernoulli, Binomial, Poisson, Exponential, Gamma, Categorical and
    MvNormal are recognised, whatever the priors and however their parameters are computed; others
    are described by hand. The statistics are summed once, so the cost of an iteration does not
    depend on the number of records.

    Parameters
    ----------
    vars : sequence of variables, optional
        All free variables, or left out.
    draws, tune, chains : int
        The plan: what ``pm.sample`` will be called with. Noise is calibrated to it; another call is
        refused before anything is spent.
    step_size : float or (d,) array, optional
        Standard deviation of the Gaussian proposal in z, per coordinate if an array. Default
        (automatic settings only): as for :class:`DPPenalty`.
    scaling : float, (d,) array, (d, d) array or dict, optional
        The A of theta = initial point + A z, in unconstrained space: about the posterior standard
        deviation of each parameter, from public knowledge. Default: a normal approximation of one
        or two noisy sums of the statistic, which are charged first.
    statistic : callable, optional
        By hand, together with the next three: the statistic S of the records. Called with one
        (n, ...) tensor, or with tensors by name where the likelihood reads ``pm.Data`` beside the
        observed variable; returns (n, m), each row computed from its record alone.
    natural : callable, optional
        The natural parameters phi, (m,). Its arguments are names of variables of the model:
        ``lambda mu, sigma: pt.stack([mu / sigma**2, -0.5 / sigma**2])``.
    log_normalizer : callable, optional
        A in p(y) = h(y) exp(phi . S(y) - A); arguments as for `natural`.
    statistic_bounds : (lower, upper), optional
        Public bounds of the entries of S, numbers or (m,) arrays: entries are clamped.
    noise_multiplier : float, optional
        Noise standard deviation over sensitivity; default: so that the plan uses the budget.
    runs : int, default 1
        How many times ``pm.sample`` may be called with this step.
    share : float, default 1
        Part of what is left of the budget that may be used, in squared mu.  The rest pays for
        other things: :func:`pymc_dp.predictive_check`, say.
    model, rng, compile_kwargs, initial_point, blocked, progressbar
        As in PyMC.

    Raises
    ------
    TypeError, ValueError, UnsafeModel, NotFactorizable, BudgetExceeded
        Before anything is spent.

    Notes
    -----
    *Guarantee.* One Gaussian release of the sums per iteration, with fresh noise; all draws
    together satisfy the budget. Stationary distribution: the exact posterior given the statistics,
    clamped to their public bounds and rounded to a fine grid, whatever the noise.

    With statistics of norm at most R (``pymc_dp.steps.families`` derives their scales) the l2
    sensitivity of the sums is 2 R if one record is replaced, 2^(1/2) R where no entry is negative
    (Categorical), and R if one is added or removed. In the last case the number of records, which
    multiplies the log-normaliser, is private, so 1 is an entry of the statistic.

    *Assumptions.* Bounds (:func:`pymc_dp.bounds`, `statistic_bounds`) and settings are public. The
    statistic is not assumed to be that of the model: it is compared with PyMC's log-density.

    *Weaknesses.* Bounds that are too narrow clamp, and the posterior is then about the clamped
    data; bounds that are too wide cost noise in proportion. The noise of a ratio grows with the
    distance moved, so the chain slows as the budget falls: chains are worth about M / (12 d s^2)
    independent draws for squared mu M, with s the change of phi per posterior standard deviation
    times the sensitivity, however many iterations are made.

    References
    ----------
    Yildirim & Ermis (2019), Exact MCMC with differentially private moves, Algorithm 3.
    """

    name = "exponential_family_penalty"
    _by_hand = ("scaling",)
    _needed = ("step_size",)

    def __init__(
        self,
        vars: Any = None,
        *,
        step_size: float | np.ndarray | None = None,
        scaling: Any = None,
        statistic: Callable[..., Any] | None = None,
        natural: Callable[..., Any] | None = None,
        log_normalizer: Callable[..., Any] | None = None,
        statistic_bounds: tuple[Any, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if "clip_norm" in kwargs:
            raise TypeError(
                "ExponentialFamilyPenalty has no argument `clip_norm`: statistics are clamped to "
                "public bounds. Declare them with dp.bounds, or as statistic_bounds."
            )
        self.step_size = step_sizes(step_size)
        self._naturals: dict[bytes, np.ndarray] = {}
        self._family = _all_or_none(statistic, natural, log_normalizer, statistic_bounds)
        super().__init__(vars, scaling=scaling, settings={}, **kwargs)
        self._family = None  # functions of the user need not reach other processes

    def _prepare(self, preparing: Preparing) -> Design:
        parts, paths = preparing.parts, preparing.paths
        self._exponential = found = exponential_model(parts, self._family, type(self).__name__)

        def ask(budget: Shares) -> Start:
            return prepare_statistic(budget, found, parts.terms, parts.start)

        at = preparing.prepared(ask, found.facts(parts.records.initial))
        if not at.trusted:
            preparing.warn_untrusted()
        d, left = self.parameters.size, 1.0 - at.spent
        noise = at.noise / math.sqrt(left)
        if self.step_size is None:
            self.step_size = np.asarray(random_walk(d, paths, noise))
        worth = 0.33 * paths / (d * (1.0 + paths * noise**2))
        if at.trusted and worth < _FEW:
            warn(
                f"The chains of this plan are worth about {worth:.2g} effective draws. A larger "
                "epsilon, more records, more draws or narrower public bounds would help; "
                f"{1.0 - left:.0%} of the budget ({at.total:.3g} of squared mu) is spent."
            )
        design = self._design(parts, at.coordinates)
        return replace(design, settings={**design.settings, "trusted": at.trusted})

    def _given(self, parts: ModelParts, scaling: np.ndarray, clip_norm: Any) -> Design:
        self._exponential = exponential_model(parts, self._family, type(self).__name__)
        return self._design(parts, Coordinates(parts.records.initial, scaling))

    def _exactness(self) -> str:
        return (
            "The records were seen through their sufficient statistic alone "
            f"({self._exponential.name}), clamped to public bounds; the draws are from the exact "
            "posterior of the statistics so clamped, as far as the chains have converged."
        )

    def _design(self, parts: ModelParts, coordinates: Coordinates) -> Design:
        found = self._exponential
        assert self.step_size is not None
        return Design(
            coordinates,
            parts.engine.with_coordinates(coordinates),
            parts.terms.with_coordinates(coordinates),
            {"statistic": found.statistic.norm},
            settings={
                "form": "exponential_family",
                "family": found.name,
                "entries": found.statistic.size,
                "step_size": self.step_size.tolist(),
            },
        )

    def _open(self, **settings: Any) -> Queries:
        statistic = self._exponential.statistic
        return StatisticQueries(statistic, statistic.norm, **settings)

    def _releases(self) -> tuple[dict[str, int], dict[str, int]]:
        return {"statistic": 1}, {}

    def _natural(self, z: np.ndarray) -> np.ndarray:
        """(m + 1,) as `ExponentialModel.natural`; remembers the last two points."""
        return at_last_two(
            self._naturals, z, lambda z: self._exponential.natural(self.coordinates.theta(z))
        )

    def _initial_state(self, z: np.ndarray) -> penalty.PenaltyState:
        if not np.isfinite(self._natural(z)).all():
            raise ValueError(
                "The natural parameters are not finite where the chain starts. Start it inside the "
                "support of the likelihood's parameters (initvals)."
            )
        return penalty.initial_state(self.rng, z, self.prior)

    def _transition(
        self, state: penalty.PenaltyState, iteration: int
    ) -> tuple[penalty.PenaltyState, bool]:
        assert self.step_size is not None and isinstance(self.queries, StatisticQueries)
        ratios = penalty.StatisticRatios(self.queries, self._natural, self._exponential.n)
        proposal = GaussianProposal(self.step_size)
        state, info = penalty.transition(self.rng, state, ratios, self.prior, proposal=proposal)
        return state, bool(info.accepted)


def _all_or_none(statistic: Any, natural: Any, log_normalizer: Any, bounds: Any) -> ByHand | None:
    """The family as the user describes it; all arguments are given, or none."""
    functions = {"statistic": statistic, "natural": natural, "log_normalizer": log_normalizer}
    given = {**functions, "statistic_bounds": bounds}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing == ["statistic", "natural", "log_normalizer"]:
        raise ValueError(
            "statistic_bounds are about statistic, which is not given. Where the family is found "
            "from the model, declare bounds of the data instead: dp.bounds(y=(lower, upper))."
        )
    if missing:
        raise ValueError(
            f"A family by hand lacks {', '.join(missing)}: give statistic, natural, log_normalizer "
            "and statistic_bounds, or none of them."
        )
    for name, function in functions.items():
        if not callable(function):
            raise ValueError(f"{name} must be a function, not {type(function).__name__}.")
    return ByHand(statistic, natural, log_normalizer, bounds)


# -- the likelihood of a model as a family --------------------------------------------------------


_AGREEMENT = 1e-9  # required relative agreement with PyMC's log-density
_RECORDS, _PLACES = 64, 24  # made-up records and parameters at which it is checked


@dataclass(frozen=True, eq=False)
class ByHand:
    """A family that the user describes; `bounds` are those of the entries of the statistic."""

    statistic: Callable[..., Any]
    natural: Callable[..., Any]
    log_normalizer: Callable[..., Any]
    bounds: tuple[Any, Any]


@dataclass(frozen=True, eq=False)
class ExponentialModel:
    """Likelihood h(y) exp(phi . S(y) - A); n is 0 where the private number of records is in S."""

    name: str
    statistic: Statistic
    n: float
    _natural: Callable[[np.ndarray], list[np.ndarray]]
    _jacobian: Callable[[np.ndarray], list[np.ndarray]]

    def __getstate__(self) -> dict[str, Any]:
        # chains need no derivatives, and PyTensor cannot pickle every function that computes them
        return {**self.__dict__, "_jacobian": None}

    def facts(self, theta: np.ndarray) -> dict[str, Any]:
        """What tells this family from others, whose preparation must not be resumed."""
        probes = [self.natural(theta + step).tobytes() for step in (0.0, 0.1, -0.3)]
        return {"family": self.name, "digest": hashlib.sha256(b"".join(probes)).hexdigest()}

    def natural(self, theta: np.ndarray) -> np.ndarray:
        """(m + 1,) phi, and -A, at unconstrained parameters."""
        return np.asarray(self._natural(theta)[0])

    def jacobian(self, theta: np.ndarray) -> np.ndarray:
        """(m + 1, d) derivatives of `natural`."""
        return np.asarray(self._jacobian(theta)[0])


class _Rows:
    """The statistic of all records of a block at once: every operation acts on numbers."""

    def __init__(self, family: Family, like: np.ndarray, compile_kwargs: Any) -> None:
        records = pt.tensor("records", dtype=like.dtype.name, shape=(None, *like.shape[1:]))
        rows = family.statistic(records).astype("float64")
        self._function = compile_function([records], rows, compile_kwargs)

    def __call__(self, arrays: list[np.ndarray]) -> np.ndarray:
        return np.asarray(self._function(np.ascontiguousarray(arrays[0]))).T


class _SingleRows:
    """The statistic given by the user, record by record, shifted and scaled to its bounds."""

    def __init__(
        self, rows: RowByRow, centre: np.ndarray, half: np.ndarray, weight: float | None
    ) -> None:
        self._rows, self._centre, self._half, self._weight = rows, centre, half, weight

    def __call__(self, arrays: list[np.ndarray]) -> np.ndarray:
        found = self._rows.compute([widened(x) for x in arrays])
        found = (found - self._centre[:, None]) / self._half[:, None]
        if self._weight is None:
            return found
        return np.vstack([found, np.full((1, found.shape[1]), self._weight)])


def exponential_model(parts: ModelParts, by_hand: ByHand | None, sampler: str) -> ExponentialModel:
    """Recognise the likelihood of a model, or take the user's description; check either.

    phi . S(y) - A is compared with PyMC's log-density on made-up records and draws of the prior:
    the difference may depend on the record alone, to 1e-9. UnsafeModel and ValueError name the
    remedy; nothing was spent then, and only types and shapes of the data were read.
    """
    model, budget = parts.model, parts.budget
    records = parts.records
    if budget.records is not None and not budget.records.trusted:
        raise UnsafeModel(f"{sampler} sends owners code, which they do not run. Use DPPenalty.")
    if budget.privacy_unit is not None:
        raise UnsafeModel(
            f"{sampler} sums one statistic per row, whose bounds do not hold for a person with "
            "several rows. Make one row per person, and leave privacy_unit out."
        )
    if len(records.groups) != 1 or len(records.groups[0].graph.names) != 1:
        names = [name for group in records.groups for name in group.graph.names]
        raise UnsafeModel(
            f"{sampler} needs a single private observed variable; the model has {names}. Use "
            "DPPenalty, or declare the public ones in PrivacyBudget(public=...)."
        )
    group = records.groups[0]
    [name] = group.graph.names
    leaves = [leaf.source for leaf in group.graph.leaves]
    observed = data_behind(model.rvs_to_values[model[name]])
    blank = group.store.synthetic(2).read()
    if by_hand is None:
        if leaves != [observed]:
            others = [v.name or "an array without a name" for v in leaves if v is not observed]
            raise UnsafeModel(
                f"The likelihood of `{name}` reads {others} for every record, so records have no "
                "common distribution. Give statistic=, natural=, log_normalizer= and "
                "statistic_bounds= by hand, or use DPPenalty."
            )
        found, spec, limits = _recognised(parts, name, blank)
    else:
        found, spec, limits = _described(parts, by_hand, name, leaves, observed, blank)
    _refuse_private_parameters(parts, found, leaves)
    minus = pt.constant(0.0) if found.log_normalizer is None else -found.log_normalizer
    both = pt.concatenate([found.natural.astype("float64"), minus.reshape((1,))])
    [both] = records.parameters.substitute([both])
    both, theta = pt.specify_shape(both, (spec.size + 1,)), records.parameters.theta
    made = ExponentialModel(
        found.name,
        spec,
        0.0 if budget.neighboring == "add_or_remove_one" else float(records.n_units),
        compile_parameter_function([theta], [both], parts.compile_kwargs),
        compile_parameter_function([theta], [jacobian_of(both, theta)], parts.compile_kwargs),
    )
    _check(parts, made, blank, limits, name)
    return made


def _limits(parts: ModelParts, leaves: list[Variable], blank: list[np.ndarray]) -> list[Interval]:
    """Public bounds of the rows of each array, infinite where there is none."""
    known = known_limits(parts.model, parts.budget.public)
    nothing = np.array(-np.inf), np.array(np.inf)
    found = []
    for leaf, x in zip(leaves, blank, strict=True):
        lower, upper = (np.broadcast_to(end, x.shape[1:]) for end in known.get(leaf, nothing))
        found.append((lower, upper))
    return found


def _recognised(
    parts: ModelParts, name: str, blank: list[np.ndarray]
) -> tuple[Family, Statistic, list[Interval]]:
    model, leaves = parts.model, [leaf.source for leaf in parts.records.groups[0].graph.leaves]
    rv = model[name]
    op = rv.owner.op
    parameters = op.dist_params(rv.owner) if hasattr(op, "dist_params") else []
    secret = parts.budget.neighboring == "add_or_remove_one"
    family = family_of(
        rv,
        model.replace_rvs_by_values(list(parameters)),
        set(parts.records.parameters.values),
        _limits(parts, leaves, blank)[0],
        secret,
    )
    kwargs = parts.compile_kwargs
    rows = _Rows(family, blank[0], kwargs)
    if secret:
        family = with_count(family, rows(blank).shape[0])
        rows = _Rows(family, blank[0], kwargs)
    spec = Statistic(rows, rows(blank).shape[0], family.norm, nonnegative=family.nonnegative)
    assert family.limits is not None
    lower, upper = (np.broadcast_to(end, (1, *blank[0].shape[1:]))[0] for end in family.limits)
    return family, spec, [(lower, upper)]


def _described(
    parts: ModelParts,
    by_hand: ByHand,
    name: str,
    leaves: list[Variable],
    observed: Variable | None,
    blank: list[np.ndarray],
) -> tuple[Family, Statistic, list[Interval]]:
    labels = [name if leaf is observed else leaf.name for leaf in leaves]
    if None in labels:
        raise UnsafeModel(
            f"The likelihood of `{name}` reads an array without a name. Pass it as pm.Data, so "
            "that statistic can take it by its name."
        )
    length = parts.records.groups[0].store.n_rows
    like = {
        label: np.broadcast_to(widened(x[:1]), (length, *x.shape[1:]))
        for label, x in zip(labels, blank, strict=True)
    }
    call = by_hand.statistic
    if len(labels) == 1:
        by_name = lambda **given: call(next(iter(given.values())))  # noqa: E731
    else:
        by_name = call
    public = parts.budget.neighboring == "replace_one"
    rows = RowByRow(like, by_name, n_is_public=public)
    m = rows.width
    lower, upper = _bounds(by_hand.bounds, m)
    centre, half = (lower + upper) / 2.0, (upper - lower) / 2.0
    natural = _function_of("natural", by_hand.natural, parts.model)
    log_normalizer = _function_of("log_normalizer", by_hand.log_normalizer, parts.model)
    if natural.type.ndim != 1 or natural.type.shape[0] not in (None, m):
        raise ValueError(f"natural must return a vector of {m} entries, as many as statistic has.")
    if log_normalizer.type.ndim != 0:
        raise ValueError("log_normalizer must return a number.")
    family = Family(
        "by hand",
        lambda y: y,
        natural * half,
        log_normalizer - (natural * centre).sum(),
        math.sqrt(m),
    )
    weight = None
    if parts.budget.neighboring == "add_or_remove_one":
        family, weight = with_count(family, m), 1.0
    spec = Statistic(
        _SingleRows(rows, centre, half, weight), m + (weight is not None), family.norm, boxed=True
    )
    return family, spec, _limits(parts, leaves, blank)


def _bounds(bounds: Any, m: int) -> Interval:
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ValueError("statistic_bounds must be a pair (lower, upper).")
    try:
        lower, upper = (np.broadcast_to(np.asarray(b, "float64"), (m,)).copy() for b in bounds)
    except (TypeError, ValueError):
        raise ValueError(
            f"statistic_bounds must be numbers, or arrays of {m} entries, as many as statistic has."
        ) from None
    usable = np.isfinite(lower).all() and np.isfinite(upper).all() and (lower < upper).all()
    if not usable or max(np.abs(lower).max(), np.abs(upper).max()) > 2.0**500:
        raise ValueError("statistic_bounds must be finite, with lower < upper.")
    return lower, upper


def _function_of(argument: str, function: Callable[..., Any], model: Model) -> Variable:
    """What a function of the model's variables returns, as a graph of the value variables."""
    try:
        names = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise ValueError(f"{argument} must be a function of variables of the model.") from None
    allowed = {rv.name: rv for rv in [*model.free_RVs, *model.deterministics, *model.data_vars]}
    chosen = {p.name: allowed.get(p.name) for p in names if p.kind is not p.VAR_KEYWORD}
    unknown = [name for name, variable in chosen.items() if variable is None]
    if unknown:
        raise ValueError(
            f"{argument} asks for {unknown}; its arguments are names of variables of the model, of "
            f"{sorted(allowed)}."
        )
    if any(p.kind is p.VAR_KEYWORD for p in names):
        chosen = {**allowed, **chosen}
    result = pt.as_tensor_variable(function(**chosen)).astype("float64")
    [graph] = model.replace_rvs_by_values([result])
    return graph


def _refuse_private_parameters(parts: ModelParts, family: Family, leaves: list[Variable]) -> None:
    """Natural parameters are computed outside of every mechanism, so they must be public."""
    model, budget = parts.model, parts.budget
    graphs = [family.natural]
    if family.log_normalizer is not None:
        graphs.append(family.log_normalizer)
    named = public_inputs(model, budget.public)
    length = budget.longest_unnamed
    what = "A natural parameter or the log-normaliser"
    for graph in graphs:
        refuse_private(graph, named, set(leaves), length, what)
    lengths = {v for v in model.dim_lengths.values() if v.owner is None} - {
        model.named_vars[name] for name in budget.public if name in model.named_vars
    }
    secret = budget.neighboring == "add_or_remove_one"
    if set(leaves) & set(ancestors(graphs)) or (secret and lengths & set(ancestors(graphs))):
        raise UnsafeModel(
            f"{what} depends on the number of records or the length of a dim. Write them as "
            "functions of the parameters alone."
        )


# -- the check ------------------------------------------------------------------------------------


def _made_up(blank: list[np.ndarray], limits: list[Interval]) -> list[np.ndarray]:
    """Records within their bounds, of the types of the data."""
    rng = np.random.default_rng(0)
    arrays = []
    for x, (lower, upper) in zip(blank, limits, strict=True):
        shape = (_RECORDS, *x.shape[1:])
        if x.dtype.kind == "b":
            arrays.append(rng.integers(0, 2, shape).astype(x.dtype))
            continue
        whole = x.dtype.kind in "iu"
        # near 0, on both sides, where there is no bound
        values = rng.normal(0.0, 3.0 if whole else 1.0, shape)
        both = np.isfinite(lower) & np.isfinite(upper)
        low, high = np.where(both, lower, 0.0), np.where(both, upper, 1.0)
        values = np.where(both, low + (high - low) * rng.random(shape), values)
        values = np.clip(np.rint(values) if whole else values, lower, upper)
        made = values.astype(x.dtype)
        made.flags.writeable = x.flags.writeable
        arrays.append(made)
    return arrays


@np.errstate(all="ignore")
def _check(
    parts: ModelParts,
    made: ExponentialModel,
    blank: list[np.ndarray],
    limits: list[Interval],
    name: str,
) -> None:
    """Compare with PyMC's log-density; see `exponential_model`."""
    arrays = _made_up(blank, limits)
    group = parts.engine.groups[0]
    at = Coordinates(np.zeros(parts.engine.d), np.eye(parts.engine.d))
    synthetic = RowGroup(group.functions, RecordStore(arrays), None)
    engine = RowEngine([synthetic], parts.engine.parameters, _RECORDS, at)
    rows = made.statistic.rows(arrays)
    if not made.statistic.boxed:
        norms = np.sqrt((rows**2).sum(axis=0))
        if not (norms <= made.statistic.norm * (1.0 + 1e-12)).all():
            raise UnsafeModel(f"The statistic of `{name}` is longer than its bound.")
    start, rng = parts.records.initial, np.random.default_rng(1)
    draws = parts.prior_draws
    nearby = start + rng.normal(0.0, 0.3, (_PLACES // 2, len(start)))
    places = [start, *nearby, *(draws[: _PLACES // 2] if draws is not None else [])]
    n = 1.0 if made.n else 0.0
    reference: tuple[np.ndarray, np.ndarray] | None = None
    compared = 0
    for theta in places:
        exact, natural = engine.log_likelihood(theta), made.natural(theta)
        if not np.isfinite(natural).all():  # a chain does not go there
            continue
        ours = natural[:-1] @ rows + n * natural[-1]
        size = 1.0 + np.abs(exact) + np.abs(natural[:-1]) @ np.abs(rows) + np.abs(natural[-1])
        difference = ours - exact
        if not np.isfinite(difference).any():
            continue
        if reference is None:
            reference = difference, size
            continue
        usable = np.isfinite(difference) & np.isfinite(reference[0])
        compared += int(usable.sum())
        error = np.abs(difference - reference[0]) / (size + reference[1])
        if (error[usable] > _AGREEMENT).any() or (np.isfinite(exact) & ~np.isfinite(ours)).any():
            raise UnsafeModel(
                f"The log-density of `{name}` differs from natural . statistic - log_normalizer by "
                "more than a function of the record (found on made-up records, at parameters drawn "
                "from the prior). Correct natural, statistic or log_normalizer, or use DPPenalty."
            )
    if compared < 2 * _RECORDS:
        raise UnsafeModel(
            f"The log-density of `{name}` is not finite at most made-up records, so its statistic "
            "cannot be checked. Declare bounds of the data (dp.bounds) within its support."
        )
