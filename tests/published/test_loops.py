"""Loops over records that are made from a model do what the model, and a plain loop, would do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from numba import njit

import pymc_dp as dp
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.published import proposals
from pymc_dp.published.reading import read

# -- code of graphs -------------------------------------------------------------------------------

GRAPHS: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda x, y, theta, k: [y / theta[0] - 2.0 * y, pt.clip(x, -0.5, 0.5) ** 2],
    "columns": lambda x, y, theta, k: [pt.stack([y, x[:, 1], x[:, 0] * y], axis=1)],
    "products": lambda x, y, theta, k: [x @ theta[1:], x @ pt.stack([theta[1:], theta[:2]]).T],
    "sums": lambda x, y, theta, k: [x.sum(axis=1) * theta.sum(), pt.max(x, axis=1)],
    "sums of rows": lambda x, y, theta, k: [(x[:, :, None] * x[:, None, :]).sum(axis=(1, 2))],
    "places": lambda x, y, theta, k: [x[:, ::-1], y[::-1], x.T.reshape((2, -1)).T, y[3:4] + y],
    "labels": lambda x, y, theta, k: [pt.eq(k[:, None], np.arange(3)) * 2, -k // 2, k % 2 > 0],
    "switches": lambda x, y, theta, k: [
        pt.switch(k > 1, pt.exp(y), pt.log(y)),
        pt.isnan(pt.log(y)),
    ],
    "logic": lambda x, y, theta, k: [pt.eq(k, 1) + pt.gt(y, 0) + (y * 2.0), (x > 0).sum(axis=1)],
    "small integers": lambda x, y, theta, k: [k.astype("int8") * np.int8(100), (k > 0) + (k > 1)],
    "one column": lambda x, y, theta, k: [pt.sqrt(theta[:1]) * y, y.reshape((-1, 1, 1))],
    "reductions": lambda x, y, theta, k: [
        pt.prod(x[:, :, None] + theta, axis=(2, 1)),
        pt.max(x[:, ::-1, None] * theta[::-1], axis=(1, 2)),
        pt.min(x[:, None, :] + theta[::2, None], axis=2),
    ],
    "pieces": lambda x, y, theta, k: [
        pt.concatenate([x[3:, ::-1], x[:0], x[:3]], axis=0),
        pt.concatenate([x[:, :0], y[:, None], x[:, ::-1]], axis=1),
    ],
    "small integers side by side": lambda x, y, theta, k: [
        pt.stack([k.astype("int8") + np.int8(j) for j in range(40)], axis=1),
        pt.stack([y > 0, k > 1], axis=1),
    ],
    "integers that overflow": lambda x, y, theta, k: [(k + 1).astype("int8") * np.int8(127)],
    "covariates": lambda x, y, theta, k: [y * np.linspace(0.0, 1.0, y.type.shape[0])],
    "chains": lambda x, y, theta, k: [pt.erfc(x) + pt.gammaln(x**2 + 1.0), pt.sigmoid(y)],
}


@pytest.mark.parametrize("name", GRAPHS)
def test_code_of_records_gives_what_pytensor_gives(name: str) -> None:
    """Also where there are more covariates than are written into code."""
    n = 100 if name == "covariates" else 5
    inputs = [
        pt.tensor(dtype=dtype, shape=shape)
        for dtype, shape in (("float64", (n, 2)), ("float64", (n,)), ("float64", (3,)))
    ] + [pt.tensor(dtype="int64", shape=(n,))]
    rng = np.random.default_rng(1)
    values = [rng.normal(size=(n, 2)), rng.normal(size=n), rng.uniform(size=3)]
    values.append(rng.integers(0, 4, n))
    graphs = GRAPHS[name](*inputs)
    loops = proposals._Loops(dict(zip(inputs, values, strict=True)), graphs)
    code = njit(error_model="numpy")(loops.records())
    plain = pytensor.function(inputs, graphs, mode=INTERPRETED, on_unused_input="ignore")
    elsewhere = [np.asfortranarray(np.repeat(x, 2, axis=0))[::2] for x in values]
    for given in (values, elsewhere):  # however they lie in memory
        found = code(*given, *loops.constants)
        for one, other in zip(found if len(graphs) > 1 else [found], plain(*values), strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            np.testing.assert_allclose(one, other, rtol=1e-12)


def test_what_has_no_such_code_is_refused() -> None:
    x, k = pt.tensor(dtype="float64", shape=(6, 2)), pt.tensor(dtype="int64", shape=(6,))
    values = {x: np.ones((6, 2)), k: np.arange(6)}
    small = x.astype("int8") @ np.array([100, 100], dtype="int8")  # would not wrap
    empty = [x[:, :0].sum(axis=1), x.sum(axis=1) + x[:0].sum()]
    for graph in (pt.cumsum(x, axis=1), x[k], x[:, k[0]], pt.tile(x, (1, 40)), small, *empty):
        with pytest.raises(NotImplementedError):
            proposals._Loops(values, [graph]).records()


# -- densities ------------------------------------------------------------------------------------


def release(kind: str, x: Any) -> None:
    if kind == "laplace":
        dp.LaplaceRelease("s", pt.stack([x, x**2], axis=1), scale=[2.0, 3.0], observed=[1.0, 9.0])
    elif kind == "gaussian":
        dp.GaussianRelease("s", x, scale=2.0, observed=1.0)
    elif kind == "geometric":
        dp.GeometricRelease("s", (x > 0).astype("int64"), scale=2.0, observed=4)
    elif kind == "several":
        dp.GaussianRelease("s", x, scale=2.0, observed=1.0)
        dp.LaplaceRelease("t", x**2, scale=2.0, observed=7.0)
    elif kind == "maximum":
        rows = pt.stack([x, x**2], axis=1)
        dp.Release("s", rows, observed=[0.0, 1.0], log_density=lambda s, t: -pt.max(pt.abs(s - t)))
    elif kind == "roots":  # NaN for negative sums, infinite at zero
        dp.Release("s", x, observed=0.0, log_density=lambda s, t: -pt.log(t) - pt.sqrt(t) + 1.0 / t)
    else:
        candidates = pt.stack([x, -x, 0.0 * x], axis=1)
        dp.ExponentialMechanismRelease("s", candidates, observed=1, epsilon=1.0, sensitivity=2.0)


@pytest.mark.parametrize(
    "kind",
    [
        *("laplace", "geometric", "several", "roots"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gaussian", "maximum", "choice")),
    ],
)
def test_the_density_is_that_of_the_releases(kind: str) -> None:
    with pm.Model() as model:
        x = pm.Normal("x", shape=6)
        release(kind, x)
    reading = read(model, [x], None)
    density = proposals.density_of(reading)
    plain = pytensor.function([reading.total], reading.log_density, mode=INTERPRETED)
    rng, published = np.random.default_rng(2), reading.published()
    width = reading.total.type.shape[0] - len(published)
    sizes = (0.0, 1.0, 1.0, 30.0, 1e200, np.inf, np.nan)
    # no counts are larger, and PyTensor's own code rounds differently out there
    for size in sizes[: 4 if kind in ("geometric", "choice") else None]:
        total = np.concatenate([size * rng.normal(size=width), published])
        with np.errstate(all="ignore"):
            expected = float(plain(total))
        expected = -math.inf if math.isnan(expected) else expected
        assert density(total) == pytest.approx(expected, rel=1e-12)


# -- a sweep --------------------------------------------------------------------------------------


def plainly(
    density: Any, new: Any, old: Any, rows: Any, local: Any, total: Any, exponential: Any, n: int
) -> list[bool]:
    """The sweep as the paper has it: every density is computed from all records."""
    decisions, width = [], rows.shape[1]
    for i, e in enumerate(exponential):
        offered = rows.copy()
        offered[i] = new[-3][i]
        totals = [np.append(x[:n].sum(axis=0), total[width:]) for x in (rows, offered)]
        with np.errstate(invalid="ignore"):
            log_alpha = density(totals[1]) - density(totals[0]) + new[-2][i] - local[i] + new[-1][i]
        decisions.append(bool(-e < log_alpha))
        if decisions[-1]:
            rows[i], local[i] = new[-3][i], new[-2][i]
            for x, y in zip(old, new, strict=False):
                x[i] = y[i]
    total[:width] = rows[:n].sum(axis=0)
    return decisions


@njit
def _limited(total: np.ndarray) -> float:
    found = total[-1] * np.abs(total[:-1]).sum()
    return found if found < 12.0 else -math.inf


@pytest.mark.parametrize("width", [3, 0])
def test_a_sweep_is_the_plain_loop(width: int) -> None:
    """Over records of any shape; with densities that are zero or not a number."""
    keep = proposals.keeping([1, 2, 3])
    replace = proposals.replacing(_limited, width, keep, proposals._answered)
    for n_present in (30, 17, 0):
        sweeps_are_plain(replace, width, n_present)


def sweeps_are_plain(replace: Any, width: int, n_present: int) -> None:
    rng, n, shapes = np.random.default_rng(3), 30, [(), (2,), (2, 3)]

    def drawn() -> list[np.ndarray]:
        found = [rng.normal(size=(n, *shape)) for shape in shapes]
        return [*found, 0.3 * rng.normal(size=(n, width)), rng.normal(size=n)]

    *old, rows, local = drawn()
    local[3] = -np.inf  # it leaves whatever comes
    total = np.append(rows[:n_present].sum(axis=0), 1.5)
    plain = [x.copy() for x in old], rows.copy(), local.copy(), total.copy()
    accepted = 0
    for sweep in range(20):
        new = [*drawn(), rng.normal(size=n)]
        new[-2][5], new[-1][7], new[-1][8] = -np.inf, np.nan, -np.inf
        exponential = rng.standard_exponential(n)
        found, lowest = replace(tuple(new), tuple(old), rows, local, total, exponential, n_present)
        decisions = plainly(_limited, new, *plain, exponential, n_present)
        assert found == sum(decisions) and not any(decisions[k] for k in (5, 7, 8))
        assert lowest == -np.inf and (sweep > 0 or decisions[3])
        accepted += found
        for one, other in zip((*old, rows, local), (*plain[0], *plain[1:3]), strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(total, plain[3], rtol=1e-12, atol=1e-12)
    assert 100 < accepted < 500


def test_sums_do_not_drift_between_refreshes() -> None:
    """Rounding errors of 64 sweeps over many records, with entries of very different size."""
    rng, n = np.random.default_rng(4), 20_000
    keep = proposals.keeping([1])
    replace = proposals.replacing(njit(lambda total: 0.0), 2, keep, proposals._answered)
    scale = np.array([1e-3, 1e6])
    rows, x = rng.normal(size=(n, 2)) * scale, np.zeros(n)
    total = rows.sum(axis=0)
    for _ in range(64):
        new = x + 1.0, rng.normal(size=(n, 2)) * scale, np.zeros(n), np.zeros(n)
        replace(new, (x,), rows, np.zeros(n), total, rng.standard_exponential(n), n)
    assert (x == 64.0).all()
    np.testing.assert_allclose(total, rows.sum(axis=0), atol=1e-13 * np.abs(rows).sum(axis=0).max())
    error = np.abs(total - rows.sum(axis=0)) / np.abs(rows).sum(axis=0)
    assert 0.0 < error.max() < 1e-12


def test_random_numbers_are_never_used_twice() -> None:
    """They are drawn for several sweeps at once, and again for each chain."""
    with pm.Model():
        x = pm.Normal("x", shape=3)
        dp.GaussianRelease("s", x, scale=2.0, observed=1.0)
        step = dp.PrivacyAwareGibbs([x])
    seen: list[np.ndarray] = []
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        step.set_rng(rng)
        seen += [np.concatenate(step.offers._drawn(rng)) for _ in range(2000)]
    assert len(np.unique(np.concatenate(seen))) == 2 * 2000 * 6
    rng = np.random.default_rng(1)
    step.set_rng(rng)
    np.testing.assert_array_equal(np.concatenate(step.offers._drawn(rng)), seen[0])


def test_records_that_others_changed_are_noticed() -> None:
    """A point whose records were replaced, or changed in place, is computed again."""
    with pm.Model() as model:
        x = pm.Normal("x", shape=4)
        dp.GaussianRelease("s", x, scale=2.0, observed=1.0)
        step = dp.PrivacyAwareGibbs([x], noncentered=False)
    point, _ = step.step(model.initial_point())
    for change in (lambda p: {**p, "x": p["x"] + 1.0}, lambda p: p["x"].__setitem__(0, 3.0) or p):
        changed = change(point)
        state = step._current(changed)
        np.testing.assert_allclose(state.total[0], changed["x"].sum())
        point, _ = step.step(changed)
        assert step._state is not None
        np.testing.assert_allclose(step._state.total[0], point["x"].sum())
