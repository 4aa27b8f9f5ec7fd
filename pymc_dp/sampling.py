"""One call: plan, sample, release. And a guard, so that no call samples without privacy."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable, Mapping
from multiprocessing.context import BaseContext
from typing import Any, Literal, NoReturn, get_args

import numpy as np
import pymc as pm
from pymc.model import Model
from pymc.sampling.mcmc import ProgressBarOptions
from pymc.stats.convergence import log_warnings, run_convergence_checks
from pymc.step_methods.compound import BlockedStep, Competence
from pymc.util import get_random_generator
from pytensor.compile.mode import get_mode
from pytensor.graph.basic import Variable

from pymc_dp import steps
from pymc_dp.base import compat as _compat
from pymc_dp.base.checks import check_integer, counted, warn
from pymc_dp.budget import (
    MODELS,
    PrivacyBudget,
    is_tagged,
    model_of,
    name_of,
    require_budget,
)
from pymc_dp.errors import PlanMismatch, UnsafeModel, UnsafeRelease
from pymc_dp.privacy.meter import interrupts_wait
from pymc_dp.publication.publish import releasable
from pymc_dp.publication.release import drop, release
from pymc_dp.publication.results import PaidDraws, check_fits
from pymc_dp.published.step import PrivacyAwareGibbs
from pymc_dp.steps.base import PrivateStep
from pymc_dp.steps.langevin import DPLangevin
from pymc_dp.tuning.preparing import PREPARES, settle, unfinished_preparations

STEPS: dict[str, type[PrivateStep]] = {name: getattr(steps, name) for name in steps.__all__}
#: Arguments of pm.sample that would bypass the private step or the release, with the reason.
_REFUSED = {
    "nuts_sampler": "external samplers are not private",
    "nuts": "NUTS is not private",
    "trace": "the raw trace holds more than may be published",
    "return_inferencedata": "only a released result is returned",
    "idata_kwargs": "the groups they add hold private data; only draws are returned",
    "init": "it is for NUTS; chains begin about the posterior, or at initvals",
}
#: What ``pm.sample`` takes, and would refuse only when the preparation is paid for.
_USABLE: dict[str, Callable[[Any], Any]] = {
    "random_seed": get_random_generator,
    "cores": lambda x: x is None or check_integer("", x, 1),
    "blas_cores": lambda x: x in (None, "auto") or check_integer("", x, 1),
    "mp_ctx": lambda x: isinstance(x, BaseContext) or multiprocessing.get_context(x),
    "progressbar": lambda x: x in (None, True, False) or x in get_args(ProgressBarOptions),
    "callback": lambda x: x is None or callable(x),
    "compile_kwargs": lambda x: x is None or get_mode(x.get("mode")),
}
_TAKEN = frozenset(inspect.signature(pm.sample).parameters)


def sample(
    draws: int | Literal["auto"] = 1000,
    *,
    tune: int | None = None,
    chains: int = 4,
    share: float = 1.0,
    step: type[PrivateStep | PrivacyAwareGibbs]
    | str
    | PrivateStep
    | PrivacyAwareGibbs = DPLangevin,
    step_kwargs: Mapping[str, Any] | None = None,
    model: Model | None = None,
    **kwargs: Any,
) -> Any:
    """Draw from the posterior, and return only what may be published.

    With :class:`pymc_dp.PrivacyAwareGibbs`, for models of published statistics, no budget is
    involved; imputed records are left out of the result unless the step was told to store them.

    Parameters
    ----------
    draws : int or "auto"
        As in ``pm.sample``; "auto" asks ``budget.plan`` how many the budget should be cut into.
    tune, chains : int
        As in ``pm.sample``.  All chains share the budget; tuning draws cost as much as others and
        are not kept, so `tune` is 0 by default (1000 with ``PrivacyAwareGibbs``).
    share : float, default 1
        Part of what is left of the budget that is used, in squared mu.  Leave some where
        :func:`pymc_dp.predictive_check`, :func:`pymc_dp.compare` or another analysis follows:
        with 0.8 the privacy noise is 12 % larger.
    step : class, name or instance, default DPLangevin
        A private step method, or ``PrivacyAwareGibbs``.  An instance of a private step must have
        been planned with the same draws, tune and chains.
    step_kwargs : dict, optional
        Settings for a step given as a class or a name.
    model : pymc.Model, optional
        Default: the model of the context.
    **kwargs
        Passed on to ``pm.sample`` (``cores``, ``random_seed``, ``initvals``, ``progressbar``, ...).

    Returns
    -------
    arviz.InferenceData (PyMC 5) or xarray.DataTree (PyMC 6)
        As from :func:`pymc_dp.release`.

    Raises
    ------
    UnsafeModel
        If the model has no budget or cannot be sampled privately.
    PlanMismatch
        If an instance was planned for another call.
    BudgetExceeded
        If the budget does not pay for the plan.
    ValueError
        If an argument is not usable.

    Notes
    -----
    ``random_seed`` fixes proposals and momenta; privacy noise always comes from the operating
    system, so two runs with one seed differ. Deterministics that may not be released are not
    computed: PyTensor might leave the data behind them in its compile directory.
    """
    model = model_of(model)
    if not isinstance(step_kwargs, Mapping | None):
        raise ValueError("step_kwargs must be a dict of settings of the step.")
    if isinstance(step, str) and step not in (*STEPS, PrivacyAwareGibbs.__name__):
        names = [*sorted(STEPS), PrivacyAwareGibbs.__name__]
        raise ValueError(f"step must be one of {names}, got {step!r}.")
    kind = step if isinstance(step, type) else type(step)
    if step == PrivacyAwareGibbs.__name__ or issubclass(kind, PrivacyAwareGibbs):
        if share != 1.0:
            raise ValueError("PrivacyAwareGibbs spends no budget: leave share out.")
        return _sample_privatized(draws, tune, chains, step, dict(step_kwargs or {}), model, kwargs)
    tune = 0 if tune is None else tune
    budget = require_budget(model, "dp.sample")
    if kwargs.get("blocked") is False or (step_kwargs or {}).get("blocked") is False:
        raise ValueError("Private steps move all variables together; blocked=False is refused.")
    for name in kwargs:
        if name in _REFUSED:
            raise ValueError(f"dp.sample does not take {name}: {_REFUSED[name]}.")
        if name not in _TAKEN:
            raise ValueError(
                f"There is no argument {name}, here or in pm.sample. Settings of a step are given "
                "in step_kwargs."
            )
    _check_call(model, chains, kwargs)
    # what may not be released is not compiled: PyTensor would write the data in it to its cache
    names = releasable(model, budget, kwargs.get("var_names"))
    # all free variables, whatever was asked for: publication moves them together
    free = [rv.name for rv in model.free_RVs]
    kwargs["var_names"] = [*free, *[name for name in names if name not in free]]
    if draws == "auto":
        before = _as_interrupted(budget, model, tune, chains, step)
        draws = before or budget.plan(model, "auto", tune, chains, step, share=share).draws
    if budget.records is not None:  # chains do not compute here
        kwargs.setdefault("cores", budget.records.processes(chains))
    settings = {**(step_kwargs or {}), **({} if share == 1.0 else {"share": share})}
    if not isinstance(step, PrivateStep):
        settings.setdefault("progressbar", bool(kwargs.get("progressbar", True)))
        settings["computed"] = kwargs["var_names"]
    paid = PaidDraws(model, kwargs["var_names"], tune)
    check_fits(model, paid.var_shapes)
    private = _step(step, draws, tune, chains, settings, model)
    checked = kwargs.pop("compute_convergence_checks", True)
    kwargs.pop("discard_tuned_samples", None)  # they are never released
    try:
        _run(private, paid, draws=draws, tune=tune, chains=chains, model=model, **kwargs)
        idata = paid.result()
        made = _compat.group(idata, "posterior").sizes
        if (made["chain"], made["draw"]) != (chains, draws):
            again = " The same call makes all draws, at no further charge." if private.waits else ""
            warn(
                f"Sampling was interrupted: the result has {counted(made['chain'], 'chain')} of "
                f"{counted(made['draw'], 'draw')}, not {chains} of {draws:,}.{again}"
            )
        if checked and not kwargs.get("quiet"):
            log_warnings(run_convergence_checks(idata, model))
        progressbar = bool(kwargs.get("progressbar", True))
        released = release(idata, model, var_names=names, progressbar=progressbar)
    except UnsafeRelease:  # nor can they be later
        drop(budget, paid)
        raise
    except BaseException as error:
        if paid.any:
            error.add_note("Draws were made and are kept: dp.release(model=model) releases them.")
        elif private.waits and not isinstance(error, PlanMismatch):
            error.add_note("What was released is not lost: the same call resumes from it.")
        raise
    drop(budget, paid)
    posterior = _compat.group(released, "posterior")
    if posterior.sizes["chain"] == chains and posterior.sizes["draw"] == draws:
        settle(private.finish)
    return released


def _check_call(model: Model, chains: int, call: Mapping[str, Any]) -> None:
    """Refuse arguments of ``pm.sample`` that are not usable, before anything is spent."""
    for name in _USABLE.keys() & call.keys():
        try:
            usable = _USABLE[name](call[name]) is not False
        except Exception:  # PyTensor raises this very class
            usable = False
        if not usable:
            raise ValueError(
                f"{name} cannot be {call[name]!r}. Nothing has been spent. Leave it out, or give "
                "what pm.sample documents."
            )
    if (given := call.get("initvals")) is None:
        return
    starts = given if isinstance(given, list | tuple) else [given] * chains
    if len(starts) != chains or not all(isinstance(start, Mapping | None) for start in starts):
        raise ValueError("initvals must be a dict, or a list of dicts, one for each chain.")
    shapes = model.eval_rv_shapes()  # by names of variables and of their transforms
    for key, value in ((k, x) for start in starts for k, x in (start or {}).items()):
        name, array = getattr(key, "name", key), np.asarray(value)
        fits = array.dtype.kind in "biuf" and array.shape == shapes.get(name)
        computed = isinstance(value, Variable) or array.tolist() in ("prior", "support_point")
        if name not in shapes or not (computed or (fits and np.isfinite(array).all())):
            known = ", ".join(f"{name} {[*map(int, shape)]}" for name, shape in shapes.items())
            raise ValueError(
                f"initvals of {name} must be finite numbers, of a free variable and of its shape: "
                f"{known}. Nothing has been spent."
            )


def _run(private: PrivateStep, paid: PaidDraws, *, model: Model, **call: Any) -> None:
    """Call ``pm.sample``; draws are kept until they are released, whatever it raises."""
    try:
        with np.errstate(all="ignore"):  # PyTensor's sums over constants tell of extreme records
            _compat.sample_into(paid, model=model, step=private, **call)
    except (KeyboardInterrupt, SystemError) as error:  # where ``pm.sample`` takes none itself
        if not paid.any or not isinstance(error.__cause__ or error, KeyboardInterrupt):
            raise
    finally:
        with interrupts_wait():
            settle(private.close)
            if paid.any:
                private.budget.unreleased.append(paid)


def _as_interrupted(
    budget: PrivacyBudget, model: Model, tune: int, chains: int, step: Any
) -> int | None:
    """The draws that "auto" gave when a preparation began that can be resumed."""
    for _, plan in unfinished_preparations(budget):
        counts = plan["settings"]
        if plan["sampler"] != name_of(step) + PREPARES:
            continue
        if (counts["tune"], counts["chains"], counts["runs"]) == (tune, chains, 1):
            epsilon = budget.epsilon_of(plan["units"])  # what was left then
            then = budget.plan(model, "auto", tune, chains, step, epsilon=epsilon).draws
            if abs(then - counts["draws"]) <= 1:  # of a budget that was inverted and rounded
                return int(counts["draws"])
    return None


def _sample_privatized(
    draws: int | str,
    tune: int | None,
    chains: int,
    step: Any,
    step_kwargs: dict[str, Any],
    model: Model,
    kwargs: dict[str, Any],
) -> Any:
    """Sample parameters and their records from published statistics; keep what is asked for."""
    if draws == "auto":
        raise ValueError("draws='auto' is for private steps, which share a budget; give a number.")
    if not isinstance(step, PrivacyAwareGibbs):
        step = PrivacyAwareGibbs(model=model, **step_kwargs)
    elif step_kwargs:
        raise ValueError("step_kwargs are for a step given as a class; this one is built already.")
    if not step.store_records:
        kwargs.setdefault("var_names", [rv.name for rv in step.reading.without_records()])
    return pm.sample(
        draws=draws,
        tune=1000 if tune is None else tune,
        chains=chains,
        step=step,
        model=model,
        **{**_compat.quick_gradients(), **kwargs},
    )


def _step(
    step: Any, draws: int, tune: int, chains: int, step_kwargs: dict[str, Any], model: Model
) -> PrivateStep:
    if isinstance(step, str):
        step = STEPS[step]
    kind = step if isinstance(step, type) else type(step)
    if not issubclass(kind, PrivateStep):
        raise ValueError(f"{kind.__name__} is not a private step; use one of {sorted(STEPS)}.")
    if kind is step:
        return kind(draws=draws, tune=tune, chains=chains, model=model, **step_kwargs)
    if step_kwargs:
        raise ValueError(
            "step_kwargs and share are for a step given as a class; this one is built already."
        )
    if not step.belongs_to(model):
        raise PlanMismatch(
            f"The {type(step).__name__} was built for another model than the one being sampled. "
            "Nothing was spent. Build the step inside the model's context."
        )
    plan = step.plan
    if (plan.draws, plan.tune, plan.chains) != (draws, tune, chains):
        raise PlanMismatch(
            f"The step was planned with draws={plan.draws}, tune={plan.tune}, "
            f"chains={plan.chains}, but dp.sample was called with draws={draws}, tune={tune}, "
            f"chains={chains}. Nothing was spent; use the same numbers."
        )
    return step


# -- the guard ------------------------------------------------------------------------------------


class BudgetGuard(BlockedStep):
    """Never samples; refuses to let other step methods sample a budgeted model."""

    name = "budget_guard"

    def step(self, point: Any) -> NoReturn:
        """Raise: the guard does not sample."""
        raise UnsafeModel("The guard of budgeted models does not sample.")

    @staticmethod
    def competence(var: Any, has_grad: bool = False) -> Competence:
        """INCOMPATIBLE, or an error for a variable of a budgeted model."""
        if is_tagged(var) or any(var in model.free_RVs for model in list(MODELS)):
            raise UnsafeModel(
                f"`{var.name}` belongs to a model with a PrivacyBudget (or to a copy of one) and "
                "would be sampled without privacy. Pass a private step for all variables: "
                "pm.sample(..., step=dp.DPLangevin(...)), or use dp.sample. For a non-private run, "
                "build the model without a budget."
            )
        return Competence.INCOMPATIBLE


def install_guard() -> None:
    """Add the guard to PyMC's step methods, once."""
    methods = pm.step_methods.STEP_METHODS
    if not any(getattr(method, "name", None) == BudgetGuard.name for method in methods):
        methods.append(BudgetGuard)
