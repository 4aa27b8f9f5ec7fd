"""Publishing a statistic of real records, in the form in which an analyst declares it."""

from __future__ import annotations

import json
import math
import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from pymc_dp.base.checks import Neighboring, check_delta, check_epsilon, check_number
from pymc_dp.base.columns import named, numbers
from pymc_dp.budget import PrivacyBudget
from pymc_dp.errors import LedgerError, PrivacyError, UnsafeModel
from pymc_dp.privacy.account import PREPARATION, STATISTIC, Account
from pymc_dp.privacy.accounting import (
    GaussianEvent,
    mu_from_budget,
    smallest_noise_multiplier,
    units_from_mu,
)
from pymc_dp.privacy.answer import Grid, LaplaceSum, Query, VectorSum
from pymc_dp.privacy.holder import Table
from pymc_dp.privacy.ledger import Ledger
from pymc_dp.privacy.meter import interrupts_wait, noise_is_secure, pay
from pymc_dp.published.releases import GaussianRelease, GeometricRelease, LaplaceRelease
from pymc_dp.rows.record_statistics import RowByRow, widened

Mechanism = Literal["gaussian", "laplace", "geometric"]
_FINEST = 30  # units of a record's bound on the grid of Laplace noise: 2^30 at most
_DECLARE: dict[str, Callable[..., Variable]] = {
    "gaussian": GaussianRelease,
    "laplace": LaplaceRelease,
    "geometric": GeometricRelease,
}


@dataclass(frozen=True)
class PublishedStatistic:
    """A statistic that may be published, with all that an analyst needs to declare it.

    Attributes
    ----------
    mechanism : {"gaussian", "laplace", "geometric"}
    observed : list of float or int
        The noisy sum; one number for a statistic of shape (n,).
    scale : list of float
        Scale of the noise on each entry: standard deviation, or Laplace scale.
    lower, upper : list of float or None
        Public bounds to which the entries of each record's row were clamped.
    row_norm : float or None
        Public bound on the norm of each record's row, l2 for "gaussian" and l1 for the others.
    n : int or None
        Number of records, where it is public.
    scalar : bool
        Whether the statistic has shape (n,).
    neighboring : {"replace_one", "add_or_remove_one"}
    statement : str
        The guarantee in words.
    privacy_guarantee : str
        "none" if the noise was reproducible, for tests.
    """

    mechanism: Mechanism
    observed: list[float]
    scale: list[float]
    lower: list[float] | None
    upper: list[float] | None
    row_norm: float | None
    n: int | None
    scalar: bool
    neighboring: Neighboring
    statement: str
    privacy_guarantee: str

    def declare(self, name: str, statistic: Any, *, present: Any = None, **kwargs: Any) -> Variable:
        """Declare the release in the model of the context.

        Parameters
        ----------
        name : str
        statistic : (n,) or (n, m) tensor
            The statistic of the latent records: what the custodian computed, before clamping.
        present : (n,) tensor, optional
            Which of the records exist (:func:`pymc_dp.present`), where their number is private.
        **kwargs
            Passed on to PyMC.

        Returns
        -------
        tensor
            The observed variable.

        Raises
        ------
        ValueError
            If the statistic has another shape than the published one.
        """
        rows = pt.as_tensor_variable(statistic)
        if rows.type.ndim != (1 if self.scalar else 2):
            raise ValueError(
                f"The published statistic has shape {'(n,)' if self.scalar else '(n, m)'}; the one "
                f"declared has {rows.type.ndim} dimensions."
            )
        length = rows.type.shape[0]
        if self.n is not None and length not in (None, self.n):
            raise ValueError(f"{self.n} records were published; the statistic has {length} rows.")
        rows = rows[:, None] if self.scalar else rows
        finite = (pt.abs(rows) < np.inf).all(axis=1, keepdims=True)
        rows = self._clamped(pt.switch(finite, rows, 0))
        if present is not None:
            rows = rows * pt.as_tensor_variable(present)[:, None]
        rows = rows[:, 0] if self.scalar else rows
        whole = self.mechanism == "geometric"
        observed = np.array(self.observed, dtype="int64" if whole else "float64")
        scale = np.array(self.scale)
        return _DECLARE[self.mechanism](
            name,
            rows.astype("int64") if whole else rows,
            scale=scale[0] if self.scalar or (scale == scale[0]).all() else scale,
            observed=observed[0] if self.scalar else observed,
            **kwargs,
        )

    def _clamped(self, rows: Variable) -> Variable:
        """What the mechanism made of (n, m) rows."""
        if self.lower is not None and self.upper is not None:
            return pt.clip(rows, np.array(self.lower), np.array(self.upper))
        assert self.row_norm is not None
        rows = rows.astype("float64")  # integers could wrap
        norms = pt.linalg.norm(rows, 2 if self.mechanism == "gaussian" else 1, axis=1)
        clipped = rows * pt.minimum(1.0, self.row_norm / pt.maximum(norms, 1e-300))[:, None]
        return pt.trunc(clipped) if self.mechanism == "geometric" else clipped

    def to_json(self) -> str:
        """All of it as JSON, to be published.

        Returns
        -------
        str
        """
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> PublishedStatistic:
        """Read what `to_json` wrote.

        Parameters
        ----------
        text : str
            From :meth:`to_json`.

        Returns
        -------
        PublishedStatistic
        """
        return cls(**json.loads(text))


def release_statistic(
    data: Mapping[str, Any],
    statistic: Callable[..., Any],
    bounds: tuple[Any, Any] | None,
    mechanism: Mechanism,
    budget: PrivacyBudget | Ledger | str | bytes | os.PathLike[str],
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    row_norm: float | None = None,
    name: str = "statistic",
    progressbar: bool = True,
) -> PublishedStatistic:
    """Publish a noisy sum over confidential records.

    Parameters
    ----------
    data : data frame, or dict of str to (n, ...) array
        Confidential records: one row of every array or column per record, of a numeric type, which
        counts as public.  A column that may lack values, as ``Int64`` of pandas and all of polars,
        is one of reals whether or not it does; where a value is missing the row counts as zeros.
    statistic : callable
        ``statistic(**data)``: a tensor with one row per record, (n,) or (n, m), written in PyTensor
        or with NumPy functions that it overloads.  The analyst declares the same function of latent
        records.  It is computed record by record, so one record cannot change another's row.
    bounds : (lower, upper) or None
        Public bounds of the entries of a row, numbers or (m,) arrays; entries are clamped.  None
        if `row_norm` is given.
    mechanism : {"gaussian", "laplace", "geometric"}
        "geometric" is Laplace noise on integers, for counts.
    budget : PrivacyBudget, Ledger or path of a ledger
        Who pays: the budget of a model of the same records, or a ledger, in which the release then
        gets an account of its own.
    epsilon, delta : float
        What this release may cost.  "laplace" and "geometric" are (epsilon, 0)-private and take no
        delta.  "gaussian" is (epsilon, delta)-private; with a PrivacyBudget leave both out to spend
        all that is left.
    row_norm : float, optional
        In place of `bounds`: public bound on the norm of a row, l2 for "gaussian" and l1 for the
        others; longer rows are scaled down.  Tighter for indicators of cells, of l1 norm 1.
    name : str, default "statistic"
        For the ledger.
    progressbar : bool, default True

    Returns
    -------
    PublishedStatistic
        May be published; `PublishedStatistic.declare` puts it into the analyst's model.

    Raises
    ------
    ValueError
        If an argument is not usable; nothing is spent.
    BudgetExceeded
        If the budget does not pay for it; no record was read.
    PrivacyError
        If the insecure noise of tests would meet a persistent ledger.

    Notes
    -----
    *Guarantee.*  A row that is not finite, or cannot be computed, counts as zeros.  Clamped rows
    are rounded to an integer grid and added exactly; "gaussian" adds an exactly rounded normal and
    is mu-Gaussian private, the others exact discrete Laplace noise (Canonne, Kamath & Steinke 2020)
    and are (epsilon, 0)-private.  The charge is committed before a record is read.  The ledger
    counts squared mu, so pure privacy is charged as the smallest mu that implies it
    (``accounting.mu_from_pure``), far more than a "gaussian" release of that epsilon at a small
    delta: "gaussian" is the better choice together with other releases.

    *Assumptions.*  `statistic`, bounds and norms are chosen without looking at the records, and so
    are types and widths of the arrays: a column of int64 tells that nothing is missing.

    *Arithmetic.*  Rows are computed in double precision, integers too, so nothing wraps: the square
    of an integer is rounded where it passes 2^53.  A cast to integers cuts off decimals.  ``~x`` is
    "not x" for arrays of truth values; for integers it is refused, as is ``+`` of truth values.

    *Weaknesses.*  Rows of one person are protected one by one; make one row per person first.
    Rounding moves a Laplace release by less than n 2^-29 of a record's bound, which its declared
    density leaves out.
    """
    arrays, n = _records(data)
    ledger, account, neighboring, n_public = _payer(budget, n)
    if mechanism not in _DECLARE:
        raise ValueError(f"mechanism must be one of {sorted(_DECLARE)}, not {mechanism!r}.")
    if (bounds is None) == (row_norm is None):
        raise ValueError("Give public bounds=(lower, upper), or row_norm in their place.")
    rows = RowByRow(arrays, statistic, mechanism == "geometric", neighboring == "replace_one")
    units, promised = _price(mechanism, epsilon, delta, ledger, account, n_public)
    scaling = _Scaling.of(bounds, row_norm, mechanism, neighboring, rows.width, n_public)
    sum_: VectorSum | LaplaceSum
    if mechanism == "gaussian":
        grid = Grid.finest(smallest_noise_multiplier(units), n_public)
        sum_ = VectorSum(grid, neighboring, rows.width, scaling.norm)
    else:
        sum_ = scaling.laplace_sum(mechanism, epsilon, neighboring, rows.width, n_public)
    event = GaussianEvent(f"{name} ({mechanism})", sum_.noise_multiplier)
    query = Query(event.mechanism, statistic, sum_)
    if sum_.told is not None:
        raise PrivacyError("A record's bound is too small or too large to compute with.")
    made_up = Table(2, lambda: np.zeros((rows.width, 2)))
    made_up.total(query)  # to compile, and to fail, before anything is charged
    secure = noise_is_secure(ledger)
    if account is None:
        account = Account.open(
            ledger,
            event.cost,
            epsilon=promised[0],
            delta=promised[1],
            neighboring=neighboring,
            unit="row",
            public_payload={"dataset": None, "public": [], "bounds": {}, "statistic": name},
        )
    plan_id = secrets.randbits(53)
    public = {
        "kind": PREPARATION,
        "sampler": STATISTIC,
        "settings": {"name": name, "mechanism": mechanism, "width": rows.width},
        "secure": secure,
        "units": event.cost,
    }
    account.record_plan(plan_id, public)
    # a bar that comes with many records would tell their number
    shown = progressbar and neighboring == "replace_one"

    def contributions() -> np.ndarray:
        return scaling.scaled(rows.compute(list(arrays.values()), shown))

    with interrupts_wait():
        noisy = Table(n, contributions).answer(query, pay(account, plan_id, event))
        secure = noise_is_secure(ledger) and secure
        observed, scale = scaling.restored(noisy, sum_.noise_sd, n)
        values = {"value": observed.tolist(), "scale": scale.tolist()}
        try:
            account.keep(plan_id, event.mechanism, values, 0)
            account.finish_plan(plan_id)
        except LedgerError as error:  # what was paid for is not lost
            warnings.warn(
                f"This statistic was charged, but the ledger could not keep a copy of it: {error}.",
                UserWarning,
                stacklevel=2,
            )
    return PublishedStatistic(
        mechanism=mechanism,
        observed=observed.tolist(),
        scale=scale.tolist(),
        lower=None if bounds is None else scaling.lower.tolist(),
        upper=None if bounds is None else scaling.upper.tolist(),
        row_norm=None if row_norm is None else float(row_norm),
        n=n if neighboring == "replace_one" else None,
        scalar=rows.scalar,
        neighboring=neighboring,
        statement=_statement(promised, mechanism, neighboring, ledger, secure),
        privacy_guarantee="differential privacy" if secure else "none",
    )


def _records(data: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], int]:
    data = named(data)
    if not isinstance(data, Mapping) or not data:
        raise ValueError("data must be a data frame, or a dict of arrays, with one row per record.")
    arrays = {}
    for name, given in data.items():
        if not hasattr(given, "dtype"):
            raise ValueError(
                f"data[{name!r}] must be an array or a column of a data frame: what type a list of "
                "numbers has would depend on the numbers."
            )
        x = numbers(f"data[{name!r}]", given)
        if x.ndim == 0 or x.dtype.itemsize > 8:
            raise ValueError(f"data[{name!r}] must be an array of numbers, one row per record.")
        arrays[name] = widened(x)
    lengths = {len(x) for x in arrays.values()}
    if len(lengths) != 1:
        raise ValueError("All arrays in data must have the same number of rows.")
    return arrays, lengths.pop()


def _payer(budget: Any, n: int) -> tuple[Ledger, Account | None, Neighboring, int]:
    if isinstance(budget, PrivacyBudget):
        if budget.privacy_unit is not None:
            raise UnsafeModel(
                "This budget protects persons with several rows, but release_statistic protects "
                "single rows. Make one row per person, with a budget for that."
            )
        if budget.neighboring == "replace_one" and n != budget.n_units:
            raise UnsafeModel(
                f"data have {n} rows, but the budget is for {budget.n_units} records. A budget "
                "pays for releases about its own records; use a ledger for others."
            )
        return budget.ledger, budget.account, budget.neighboring, budget.n_public
    if isinstance(budget, str | bytes | os.PathLike):
        budget = Ledger.open(budget)
    if not isinstance(budget, Ledger):
        raise ValueError("budget must be a PrivacyBudget, a Ledger, or the path of a ledger.")
    # under add_or_remove_one the number is private; the grid must not depend on it
    relation = budget.neighboring
    if relation == "replace_one" and n == 0:
        raise ValueError("data have no rows.")
    return budget, None, relation, n if relation == "replace_one" else 2**24


def _price(
    mechanism: str,
    epsilon: float | None,
    delta: float | None,
    ledger: Ledger,
    account: Account | None,
    n_public: int,
) -> tuple[int, tuple[float, float]]:
    """Ledger units of a Gaussian release, and what is promised about the release."""
    if mechanism != "gaussian":
        if epsilon is None or delta is not None:
            raise ValueError(f"mechanism={mechanism!r} needs epsilon, and takes no delta.")
        # an account states a positive delta; the release does without
        return 0, (check_epsilon(epsilon), 1e-300)
    if epsilon is None and delta is None and account is not None:
        info = account.read()
        if info.remaining < 1:
            raise ValueError("Nothing is left of the budget.")
        return info.remaining, (info.epsilon, info.delta)
    if epsilon is None or delta is None:
        raise ValueError("mechanism='gaussian' needs epsilon and delta.")
    promised = check_epsilon(epsilon), check_delta(delta)
    if promised[1] >= 1.0 / n_public:
        raise ValueError(
            f"delta={promised[1]!r} is not below 1/n = {1 / n_public:.2g}: it would allow "
            "publishing somebody's record outright."
        )
    units = units_from_mu(mu_from_budget(*promised))
    if units < 1:
        raise ValueError("epsilon and delta are too small to be counted; raise one of them.")
    return units, promised


def _statement(
    promised: tuple[float, float],
    mechanism: str,
    neighboring: str,
    ledger: Ledger,
    secure: bool,
) -> str:
    if not secure:
        return "No privacy: the noise was reproducible, for tests."
    epsilon, delta = promised
    what = f"({epsilon!r}, {delta!r})" if mechanism == "gaussian" else f"({epsilon!r}, 0)"
    change = (
        "replacing one record" if neighboring == "replace_one" else "adding or removing one record"
    )
    where = (
        "Other releases about these records are not counted (temporary ledger)."
        if ledger.is_temporary
        else "Together with other releases about these records it is counted in a ledger."
    )
    return (
        f"This statistic was published with {what}-differential privacy under {change}, by the "
        f"{mechanism} mechanism. {where}"
    )


@dataclass(frozen=True)
class _Scaling:
    """From rows to contributions, (row - centre) / half; without bounds the rows themselves."""

    norm: float  # bound on the norm of a contribution
    lower: np.ndarray
    upper: np.ndarray
    centre: np.ndarray
    half: np.ndarray
    one_sided: bool = False  # as of `pymc_dp.privacy.answer.LaplaceSum`

    @classmethod
    def of(
        cls,
        bounds: tuple[Any, Any] | None,
        row_norm: float | None,
        mechanism: str,
        neighboring: str,
        width: int,
        n_public: int,
    ) -> _Scaling:
        """Bounds as the user gave them."""
        whole = mechanism == "geometric"
        zeros, ones = np.zeros(width), np.ones(width)
        if bounds is None:
            norm = check_number("row_norm", row_norm)
            if norm <= 0 or (whole and norm != int(norm)):
                raise ValueError("row_norm must be positive, and an integer for 'geometric'.")
            return cls(norm, zeros - np.inf, zeros + np.inf, zeros, ones)
        if not isinstance(bounds, tuple | list) or len(bounds) != 2:
            raise ValueError("bounds must be a pair (lower, upper).")
        try:
            low, high = (np.broadcast_to(np.asarray(b, float), (width,)).copy() for b in bounds)
        except ValueError:
            raise ValueError(f"bounds must be numbers, or arrays of {width} entries.") from None
        if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
            raise ValueError("bounds must be finite, with lower < upper.")
        replaced = neighboring == "replace_one"
        if whole:
            if (low != np.rint(low)).any() or (high != np.rint(high)).any():
                raise ValueError("bounds must be integers for 'geometric'.")
            if max(np.abs(low).max(), np.abs(high).max()) > 2.0**40:
                raise ValueError("bounds must be integers up to 2^40 for 'geometric'.")
            if replaced:  # rows become x - lower, from 0 to upper - lower
                if n_public * np.abs(low).max() > 2.0**62:
                    raise ValueError(
                        f"The sum of {n_public} records may not fit into 64 bits: for 'geometric' "
                        "give bounds nearer to 0, and subtract a public number in `statistic`."
                    )
                norm = float((high - low).sum())
                return cls(norm, low, high, low, ones, one_sided=True)
            norm = float(np.maximum(np.abs(low), np.abs(high)).sum())
            return cls(norm, low, high, zeros, ones)
        if max(np.abs(low).max(), np.abs(high).max()) > 2.0**900:
            raise ValueError("bounds are too large to compute with.")
        centre = (low + high) / 2.0 if replaced else zeros
        half = np.maximum(high - centre, centre - low)
        norm = math.sqrt(width) if mechanism == "gaussian" else float(width)
        return cls(norm, low, high, centre, half)

    def laplace_sum(
        self, mechanism: str, epsilon: Any, neighboring: Neighboring, width: int, n_public: int
    ) -> LaplaceSum:
        """The sum of contributions, on the finest grid on which it fits into 64 bits."""
        unit: float
        if mechanism == "geometric":
            bound, unit = int(self.norm), 1  # sums of integers stay integers
        else:
            bound = 2 ** max(1, min(_FINEST, 60 - math.ceil(math.log2(max(n_public, 2)))))
            unit = self.norm / bound
        if not 1 <= bound < 2**40:
            raise PrivacyError("The bound of a record's statistic must be from 1 to 2^40.")
        sum_ = LaplaceSum(width, bound, unit, float(epsilon), neighboring, self.one_sided)
        if 64.0 * sum_.noise_sd / unit + float(n_public) * bound > 2.0**62:
            raise PrivacyError("The noisy sum may not fit into 64 bits; raise epsilon.")
        return sum_

    def scaled(self, rows: np.ndarray) -> np.ndarray:
        """(m, n) contributions; rows that are not finite become 0 before they are clamped."""
        finite = np.isfinite(rows).all(axis=0)
        rows = np.where(finite, rows, 0.0)
        clamped = np.clip(rows, self.lower[:, None], self.upper[:, None])
        return np.ascontiguousarray((clamped - self.centre[:, None]) / self.half[:, None])

    def restored(self, noisy: np.ndarray, scale: float, n: int) -> tuple[np.ndarray, np.ndarray]:
        """The published sum and the scale of its noise; where n is private, the centre is 0."""
        if np.issubdtype(noisy.dtype, np.integer):
            offset = np.array([n * int(c) for c in self.centre], dtype=np.int64)
            return noisy + offset, np.full(len(noisy), scale)
        return noisy * self.half + n * self.centre, scale * self.half
