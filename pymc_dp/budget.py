"""The privacy budget of a model: what is promised, to whom, and what has been spent."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from html import escape
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pymc as pm
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant
from pytensor.graph.traversal import ancestors

from pymc_dp.base.checks import check_budget, check_integer, check_neighboring
from pymc_dp.errors import UnsafeModel
from pymc_dp.privacy.account import Account, Spending, epsilon_of
from pymc_dp.privacy.accounting import (
    GaussianEvent,
    batch_event,
    mu_from_budget,
    units_from_mu,
)
from pymc_dp.privacy.ledger import Ledger
from pymc_dp.records.bounds import check_public, seal, stated
from pymc_dp.records.extraction import Records, extract
from pymc_dp.records.units import (
    count_units,
    holds_stand_ins,
    longest_unnamed,
    private_observed,
    row_counts,
)

#: Arrays with one entry per unit may be private; those of one or two entries cannot be recognised.
_FEWEST_UNITS = 3
_ATTRIBUTE = "pymc_dp_budget"
_TAG = "pymc_dp_account"
#: Budgeted models of this process, for the guard of :mod:`pymc_dp.sampling`.
MODELS: weakref.WeakSet[Model] = weakref.WeakSet()
#: Ledger of the data seen under a temporary ledger, by keyed digest; the key dies with the process.
_KEY = os.urandom(32)
_SEEN: dict[bytes, str] = {}


class PrivacyBudget:
    """A differential-privacy budget, attached to a PyMC model.

    Declare it last in the model, after the observed variables.

    Parameters
    ----------
    epsilon, delta : float
        Everything released under this budget together is (epsilon, delta) differentially private.
        epsilon from 1e-3 to 1e6; delta from 1e-300 to 0.5, well below 1 / number of units.
    neighboring : {"replace_one", "add_or_remove_one"}
        Neighbours differ in one unit, whose data are replaced (the number of units is then public;
        the default, and the relation of the source papers), or which is added or removed.
    privacy_unit : (n,) array or column of ids, or dict of str to such, optional
        The person, or other unit, that each row belongs to, when several rows belong to one.  Ids
        are integers, text, categories or dates, compared exactly and replaced by numbers; they are
        private.  A dict gives ids per observed variable, needed when they differ in length.
        Default: every row is a unit of its own.
    public : sequence of str
        Names of ``pm.Data``, observed variables or dims that are not private.  NumPy arrays have
        no name; those with one entry per record are private.
    n_public : int, optional
        A public number of units.  Needed for ``neighboring="add_or_remove_one"``, where the number
        of units is itself private.
    ledger : str, bytes, os.PathLike or Ledger, optional
        A persistent ledger, made with :meth:`pymc_dp.Ledger.create`: the budget reserves its share
        of it.  Default: a temporary ledger, which does not count what other sessions spend.
    dataset : str, optional
        Your label for the data, shown in statements.  A label, never a hash.
    records : DaskRecords, optional
        Records on other machines, from :func:`pymc_dp.from_dask`: the model was built on their
        examples.  They know their privacy units.  Default: the data of the model are the records.
    resume : bool, default False
        Resume the newest budget on `ledger` that promises the same for as many units, as an owner
        does whose process was started again (:class:`Owner`).  Default: reserve another share.
    model : pymc.Model, optional
        Default: the model of the context.

    Raises
    ------
    ValueError
        If an argument is out of range.
    UnsafeModel
        If the model already has a budget, is nested, is a copy of a budgeted model, or has no
        private observed variable.
    BudgetExceeded
        If the share would pass the cap of the ledger.

    Notes
    -----
    *Guarantee.* The whole transcript of all releases under the budget is mu-GDP with mu^2 the sum
    of their squared mu, and a release is refused when that sum would pass the budget: a filter that
    is valid with everything chosen adaptively from earlier releases (Smith & Thakurta 2022;
    Koskela, Tobaben & Honkela 2022).

    *Assumptions.* Model, priors, bounds and settings are chosen without looking at the private
    data. The machine and its operator are trusted.

    *Weaknesses.* Time and memory use are not protected.
    """

    #: What the rest of the budget will buy: a method that `pymc_dp.tuning.forecast` defines, as a
    #: forecast decides no epsilon.
    plan: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        epsilon: float,
        delta: float,
        *,
        neighboring: str = "replace_one",
        privacy_unit: Any = None,
        public: Iterable[str] = (),
        n_public: int | None = None,
        ledger: str | bytes | os.PathLike[str] | Ledger | None = None,
        dataset: str | None = None,
        records: Any = None,
        resume: bool = False,
        model: Model | None = None,
    ) -> None:
        _refuse_in_a_worker()
        self.epsilon, self.delta = check_budget(epsilon, delta)
        self.neighboring = check_neighboring(neighboring)
        if isinstance(public, str):
            raise ValueError(f"public must be a list of names; write public=[{public!r}].")
        public = tuple(public) if isinstance(public, Iterable) else (public,)
        if not all(isinstance(name, str) for name in public):
            raise ValueError("public must be a list of names (strings).")
        if dataset is not None and not isinstance(dataset, str):
            raise ValueError("dataset must be a label (a string), never the data themselves.")
        if records is not None:
            if privacy_unit is not None:
                raise ValueError("The records know their privacy units: leave privacy_unit out.")
            privacy_unit = records.example_ids
        self.public = public
        self.records = records
        self.dataset = dataset
        model = pm.modelcontext(model)
        _refuse_unsuitable(model, ledger)
        computed = {variable.name for variable in (*model.unobserved_RVs, *model.potentials)}
        known = {*model.named_vars, *model.coords} - computed
        unknown = [name for name in self.public if name not in known]
        if unknown:
            raise ValueError(
                f"public names {unknown}, which are no pm.Data, observed variable or dim of the "
                f"model; those are {sorted(known)}."
            )
        check_public(model, self.public)
        if records is None and holds_stand_ins(model):
            raise UnsafeModel(
                "The model is built on records.example(...), made-up rows that stand for records "
                "on other machines. Give the budget these records: PrivacyBudget(..., "
                "records=records)."
            )
        #: Units in the arrays of the model: all, unless the records are elsewhere.
        self._of_model, units = count_units(model, self.public, privacy_unit)
        #: The unit of each row, by name of the observed variable; None if it is the row itself.
        self.privacy_unit = None if privacy_unit is None else units
        self._n_units = self._of_model if records is None else records.n_units
        self.row_counts = row_counts(model, self.public)
        self.n_public = self._public_size(n_public)
        self._public_of_model = self.n_public if records is None else self._of_model
        if privacy_unit is not None and self.n_public < _FEWEST_UNITS:
            raise ValueError(
                f"privacy_unit gives all rows to fewer than {_FEWEST_UNITS} units; nothing can be "
                "hidden among so few. Give every row the id of the person or unit it is about."
            )
        if self.delta >= 1.0 / self.n_public:
            raise ValueError(
                f"delta={self.delta:g} is not below 1/n = {1 / self.n_public:.2g}: it would allow "
                "publishing somebody's record outright. Choose delta well below 1/n."
            )
        cap = units_from_mu(mu_from_budget(self.epsilon, self.delta))
        if ledger is None:
            ledger = Ledger.temporary(self.neighboring)
        self.ledger = ledger if isinstance(ledger, Ledger) else Ledger.open(ledger)
        if self.ledger.is_temporary and records is None:
            self._warn_if_counted_elsewhere(model)
        self.account = Account.open(
            self.ledger,
            cap,
            epsilon=self.epsilon,
            delta=self.delta,
            neighboring=neighboring,
            unit=self.unit,
            public_payload={
                "dataset": dataset,
                "public": list(self.public),
                "bounds": stated(model),
                **({"n_public": self.n_public} if resume else {}),
            },
            resume=resume,
        )
        self._variables = tuple(rv.name for rv in model.basic_RVs)
        #: Draws of `pymc_dp.sample` that are paid for and not released, the newest last.
        self.unreleased: list[Any] = []
        setattr(model, _ATTRIBUTE, self)
        seal(model)
        for rv in model.basic_RVs:  # survives copies of the model, which lose its attributes
            setattr(rv.tag, _TAG, self.account.number)
        MODELS.add(model)
        self._sealed = True

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_sealed", False):
            raise AttributeError(
                f"{name} of a PrivacyBudget cannot be changed: what was promised stays promised. "
                "Build the model again for another budget, on one ledger for both."
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Processes of chains get no draws of earlier runs, nor the model and data behind them."""
        return {**self.__dict__, "unreleased": []}

    # -- attaching ------------------------------------------------------------------------------

    def _public_size(self, n_public: int | None) -> int:
        if n_public is not None:
            n_public = check_integer("n_public", n_public, minimum=2)
        if self.neighboring == "add_or_remove_one":
            if n_public is None:
                raise ValueError(
                    "neighboring='add_or_remove_one' hides the number of units, so the noise "
                    "cannot be set from it: give a public round figure, n_public=..."
                )
            return n_public
        if n_public is not None and n_public != self._n_units:
            raise ValueError(
                "n_public differs from the number of units, which is public under "
                "neighboring='replace_one'. Leave it out."
            )
        return self._n_units

    def _warn_if_counted_elsewhere(self, model: Model) -> None:
        digest = _digest(model, self.public)
        if _SEEN.setdefault(digest, self.ledger.path) != self.ledger.path:
            warnings.warn(
                "These data already have a budget in this session. The two are counted apart, so "
                "neither statement covers both releases. Use one ledger for both, best a "
                "persistent one: dp.Ledger.create(path), then PrivacyBudget(..., ledger=path).",
                UserWarning,
                stacklevel=3,
            )

    # -- what it says ---------------------------------------------------------------------------

    @property
    def unit(self) -> str:
        """What one privacy unit is."""
        return "row" if self.privacy_unit is None else "unit (all rows with one id)"

    @property
    def secrecy(self) -> dict[str, Any]:
        """What is public and what is secret: arguments of `pymc_dp.records.extraction.extract`."""
        return {
            "public": self.public,
            "privacy_unit": self.privacy_unit,
            "count_is_private": self.neighboring == "add_or_remove_one",
            "n_public": self._public_of_model,
            "elsewhere": self.records is not None,
        }

    @property
    def rows_are_private(self) -> bool:
        """Whether nothing may depend on the number of rows: it is private, as a unit may bring any
        number, or the model has other rows than the records.
        """
        private = self.neighboring == "add_or_remove_one" or self.privacy_unit is not None
        return private or self.records is not None

    @property
    def sensitivity(self) -> float:
        """l2 sensitivity of a sum of vectors of norm at most 1."""
        return 2.0 if self.neighboring == "replace_one" else 1.0

    @property
    def longest_unnamed(self) -> int:
        """Number of entries from which on an array without a name may be private."""
        private = self.neighboring == "add_or_remove_one"
        return longest_unnamed(self._of_model, self._public_of_model if private else None)

    @property
    def n_units(self) -> int:
        """Number of privacy units; private under ``add_or_remove_one``."""
        return self._n_units

    def epsilon_of(self, units: int, batches: dict[str, Any] | None = None) -> float:
        """Epsilon, at the budget's delta, of a cost in ledger units, and of releases on batches.

        Parameters
        ----------
        units : int
            Ledger units, 2^-40 of squared mu, beside the releases on batches.
        batches : dict, optional
            What :meth:`batches` says.  Default: there are none.

        Returns
        -------
        float
        """
        return epsilon_of(self, units, batches)

    def spent(self) -> Spending:
        """What has been charged so far, unused parts of open leases included.

        Returns
        -------
        Spending
            Its ``epsilon`` at the budget's delta, and ``gdp_mu2``, squared Gaussian-DP mu.
        """
        return self.account.spent()

    def remaining(self) -> Spending:
        """What may still be charged.

        Epsilons do not add up: ``spent().epsilon + remaining().epsilon`` is more than the budget's
        epsilon. The squared mu add up.

        Returns
        -------
        Spending
        """
        return self.account.remaining()

    def records_of(self, model: Model, *, check: bool = True, read: bool = True) -> Records:
        """The records of a model that can be sampled privately; nothing is spent.

        Parameters
        ----------
        model : pymc.Model
        check, read : bool
            As for ``pymc_dp.records.extraction.extract``.

        Returns
        -------
        Records

        Raises
        ------
        UnsafeModel, NotFactorizable, ValueError
            With the variable and the remedy.
        """
        records = extract(model, **self.secrecy, check=check, read=read)
        parameters = records.parameters
        for value, where in zip(parameters.values, parameters.slices, strict=True):
            # a search cannot begin where a density has no slope
            if not np.isfinite(records.initial[where]).all():
                raise ValueError(
                    f"The initial value of {model.values_to_rvs[value].name} lies on the edge of "
                    "its support, from where nothing moves. Nothing has been spent. Give it "
                    "another one, inside: initval=."
                )
        if self.records is not None and read:
            return self.records.in_place_of(records, model)
        return records

    def table(self) -> pd.DataFrame:
        """What was charged for what.

        Returns
        -------
        pandas.DataFrame
            One row per plan and mechanism (each one-off release is one): sampler, mechanism, noise
            multiplier, releases charged, epsilon of them alone, and their share of the budget; then
            the totals.
        """
        charged: dict[tuple[int, GaussianEvent], int] = {}
        samplers: dict[int, str] = {}
        for plan_id, plan, event, count in self.releases():
            samplers[plan_id] = plan["sampler"]
            charged[plan_id, event] = charged.get((plan_id, event), 0) + count
        info = self.account.read()
        cap, rows = info.cap, []
        for (plan_id, event), count in charged.items():
            units = count * event.cost
            what = samplers[plan_id], event.mechanism, event.noise_multiplier, count
            rows.append([*what, self.epsilon_of(units), units / cap])
        found = self.batches()
        if found is not None:
            batches, units = batch_event(found["event"]), found["reserved"]
            label = f"{batches.mechanism}, {batches.batch}"
            what = "", label, batches.noise_multiplier, found["releases"]
            rows.append([*what, self.epsilon_of(0, found), units / cap])
        rows.append(["spent", "", np.nan, "", self.spent().epsilon, info.spent / cap])
        left = info.remaining
        rows.append(["remaining", "", np.nan, "", self.epsilon_of(left), left / cap])
        rows.append(["budget", "", np.nan, "", self.epsilon, 1.0])
        return pd.DataFrame(
            rows,
            columns=["sampler", "mechanism", "noise_multiplier", "releases", "epsilon", "share"],
        )

    def batches(self) -> dict[str, Any] | None:
        """The releases on batches of records that were charged, as the ledger has them.

        Returns
        -------
        dict or None
        """
        return self.account.batches()

    def releases(self) -> Iterator[tuple[int, dict[str, Any], GaussianEvent, int]]:
        """Id and payload of the plan, event and number of every charge, oldest first.

        Returns
        -------
        iterator of (int, dict, GaussianEvent, int)
            The number is negative where the unused part of a lease was returned.  Releases on
            batches are not among them: see `batches`.
        """
        for entry, plan, counts in self.account.charges():
            assert entry.plan is not None
            for event, count in counts.items():
                yield entry.plan, plan, event, count

    def _repr_html_(self) -> str:
        """For notebooks: the promise, and what was charged for what."""
        data = f"{self.dataset}: " if self.dataset else ""
        table = self.table().to_html(index=False, na_rep="", float_format="{:.4g}".format)
        return f"<p>{escape(data + repr(self))}</p>{table}"

    def __repr__(self) -> str:
        return (
            f"PrivacyBudget(epsilon={self.epsilon:g}, delta={self.delta:g}, "
            f"neighboring={self.neighboring!r}, spent epsilon={self.spent().epsilon:.4g})"
        )


def _refuse_unsuitable(model: Model, ledger: object) -> None:
    if getattr(model, _ATTRIBUTE, None) is not None:
        raise UnsafeModel(
            "The model already has a PrivacyBudget. A budget cannot be replaced or enlarged; to "
            "start again, rebuild the model (and use one persistent ledger for all budgets on "
            "these data)."
        )
    if model.parent is not None:
        raise UnsafeModel("The model is nested. Attach the budget to the outermost model.")
    if has_lost_budget(model) and ledger is None:
        raise UnsafeModel(
            "The model is a copy of one with a PrivacyBudget, which a copy does not carry along. "
            "Use the original model, or build the model again; give a persistent ledger so that "
            "both budgets are counted together."
        )


def _digest(model: Model, public: Iterable[str]) -> bytes:
    """A keyed digest of the observed data, to recognise them within this process."""
    digest = hashlib.blake2b(key=_KEY)
    for rv in private_observed(model, public):
        for source in ancestors([model.rvs_to_values[rv]]):
            if isinstance(source, Constant):
                digest.update(np.ascontiguousarray(source.data).tobytes())
            elif isinstance(source, SharedVariable):
                digest.update(np.ascontiguousarray(source.get_value(borrow=True)).tobytes())
    return digest.digest()


def _refuse_in_a_worker() -> None:
    """A script without a main guard runs again in every spawned worker, and would pay again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "A worker process is running your script again, and would open and spend a budget of "
            "its own. Nothing has been spent. Put what the script does below "
            "`if __name__ == '__main__':`."
        )


def model_of(given: Model | None) -> Model:
    """The model given, or that of the context; TypeError if there is none."""
    try:
        model = pm.modelcontext(given)
    except TypeError:
        raise TypeError("There is no model: call this inside `with model:`, or give it.") from None
    if not isinstance(model, Model):
        raise ValueError(
            f"model must be a PyMC model, not {type(model).__name__}. Check the order of the "
            "arguments, or give them by their names: model=model, draws=500."
        )
    return model


def name_of(step: Any) -> str:
    """The name of a step method, given by name, as a class or as an instance."""
    return step if isinstance(step, str) else getattr(step, "__name__", type(step).__name__)


def get_budget(model: Model | None = None) -> PrivacyBudget | None:
    """The budget of a model, or ``None``.

    Parameters
    ----------
    model : pymc.Model, optional
        Default: the model of the context.  A nested model has the budget of the outermost one.

    Returns
    -------
    PrivacyBudget or None
    """
    return getattr(pm.modelcontext(model).root, _ATTRIBUTE, None)


def require_budget(model: Model, what: str) -> PrivacyBudget:
    """The budget of a complete model; UnsafeModel tells how to give it one, for `what` needs it."""
    if has_lost_budget(model):
        raise UnsafeModel(
            "This model is a copy of one with a PrivacyBudget, and copies do not carry it. Build "
            "the step for the original model."
        )
    if model.parent is not None:
        raise UnsafeModel(
            f"{what} was given a nested model, which is only a part of the variables. Use the "
            "outermost model."
        )
    budget = get_budget(model)
    if budget is None:
        raise UnsafeModel(
            f"{what} needs a privacy budget. Add one line at the end of the model:\n"
            "    dp.PrivacyBudget(epsilon=1.0, delta=1e-6)"
        )
    check_model(budget, model)
    if row_counts(model, budget.public) != budget.row_counts:
        raise UnsafeModel(
            "The observed data have changed their length since the PrivacyBudget was declared "
            "(pm.set_data?). Build the model and its budget with the data that are sampled."
        )
    return budget


def check_model(budget: PrivacyBudget, model: Model) -> None:
    """Refuse a model that grew after the budget was declared."""
    added = [rv.name for rv in model.basic_RVs if rv.name not in budget._variables]
    if added:
        raise UnsafeModel(
            f"{added} were added to the model after its PrivacyBudget. Declare the budget last, "
            "after all random variables."
        )


def has_lost_budget(model: Model) -> bool:
    """True for a copy of a budgeted model: its variables are tagged, but no budget is attached."""
    if getattr(model.root, _ATTRIBUTE, None) is not None:
        return False
    return any(is_tagged(rv) for rv in model.basic_RVs)


def is_tagged(rv: Any) -> bool:
    """True for a random variable of a budgeted model or of a copy of one."""
    return hasattr(rv.tag, _TAG)


def untagged(rv: Any) -> Any:
    """The random variable of a copied model, as one of a model that holds no private data."""
    rv.tag.__dict__.pop(_TAG, None)
    return rv
