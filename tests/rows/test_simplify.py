"""Log-likelihoods of rows written otherwise: the same values with fewer slow functions."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors
from pytensor.scalar.basic import Composite
from pytensor.tensor.elemwise import Elemwise
from scipy.special import expit, gammaln, log_expit

from pymc_dp.base.matrices import Coordinates
from pymc_dp.records.extraction import extract
from pymc_dp.rows import functions
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import compile_function, hoisted, simplified

N = 1013
RNG = np.random.default_rng(3)
X = RNG.normal(size=N)
# impossible outcomes among them
CHOICES = RNG.integers(-1, 3, N)
COUNTS = RNG.poisson(3.0, N) - 1
AMOUNTS = RNG.gamma(2.0, 1.0, N)
# 200 X is about where exp overflows, and where logistic functions have long been 0 or 1
PLACES = (0.0, 1.0, -30.0, 200.0)


@cache
def compiled(declare: Callable[[pt.Variable], None]) -> RowEngine:
    with pm.Model() as model:
        declare(pm.Flat("b"))
    return RowEngine.of(extract(model, check=False), Coordinates(np.zeros(1), np.eye(1)))


def engine(declare: Callable[[pt.Variable], None], at: float) -> RowEngine:
    return compiled(declare).with_coordinates(Coordinates(np.array([at]), np.eye(1)))


def bernoulli(b: pt.Variable) -> None:
    pm.Bernoulli("y", logit_p=b * X, observed=CHOICES)


def poisson(b: pt.Variable) -> None:
    pm.Poisson("y", mu=pm.math.exp(b * X), observed=COUNTS)


def gamma(b: pt.Variable) -> None:
    # an array: PyTensor takes the number 2.5 for one of single precision
    pm.Gamma("y", alpha=np.array(2.5), beta=pm.math.exp(b * X), observed=AMOUNTS)


def log_bernoulli(eta: np.ndarray) -> np.ndarray:
    value = np.where(CHOICES == 1, log_expit(eta), log_expit(-eta))
    return np.where((CHOICES < 0) | (CHOICES > 1), -np.inf, value)


def log_poisson(eta: np.ndarray) -> np.ndarray:
    value = COUNTS * eta - np.exp(eta) - gammaln(COUNTS + 1.0)
    return np.where(COUNTS < 0, -np.inf, value)


def log_gamma(eta: np.ndarray) -> np.ndarray:
    return 2.5 * eta - gammaln(2.5) + 1.5 * np.log(AMOUNTS) - np.exp(eta) * AMOUNTS


@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize(
    ("declare", "expected"),
    [(bernoulli, log_bernoulli), (poisson, log_poisson), (gamma, log_gamma)],
)
def test_values_and_scores(declare, expected, at: float) -> None:
    rows = engine(declare, at)
    with np.errstate(all="ignore"):
        found, right = rows.log_likelihood(np.zeros(1)), expected(at * X)
        ordinary = np.isfinite(right)
        np.testing.assert_allclose(found[ordinary], right[ordinary], rtol=1e-12, atol=1e-12)
        assert (found[~ordinary] == -np.inf).all()
        scores = np.concatenate(
            [block[0].copy() for _, block in rows.vectors(rows.scores(np.zeros(1)))]
        )
        slope = {
            bernoulli: CHOICES - expit(at * X),
            poisson: COUNTS - np.exp(at * X),
            gamma: 2.5 - np.exp(at * X) * AMOUNTS,
        }[declare]
    inside = ordinary & np.isfinite(slope)
    scale = np.abs(X) * (1.0 + np.abs(slope))
    assert (np.abs(scores - slope * X)[inside] <= 1e-12 * scale[inside]).all()


def slow_functions(declare: Callable[[pt.Variable], None]) -> list[str]:
    """Transcendental functions that are evaluated for every row and place."""
    functions = engine(declare, 0.0).groups[0].functions
    names = []
    for node in functions._loglik.maker.fgraph.toposort():
        if isinstance(node.op, Elemwise):
            scalar = node.op.scalar_op
            fused = scalar.fgraph.toposort() if isinstance(scalar, Composite) else []
            names += [type(inner.op).__name__ for inner in fused] or [type(scalar).__name__]
    return sorted(set(names) & {"Exp", "Log", "Log1p", "GammaLn", "Sigmoid", "Softplus"})


@pytest.mark.parametrize(
    ("declare", "expected"), [(bernoulli, ["Softplus"]), (poisson, ["Exp"]), (gamma, ["Exp"])]
)
def test_slow_functions_are_few(declare, expected: list[str]) -> None:
    assert slow_functions(declare) == expected


def test_a_missing_number_stays_impossible() -> None:
    x, y = pt.vector("x"), pt.vector("y", dtype="int64")
    p = pt.sigmoid(x)
    value = pt.switch((p >= 0) & (p <= 1), pt.switch(y, -pt.softplus(-x), pt.log1p(-p)), -np.inf)
    at = {x: np.array([np.nan, 0.0, 2.0, 2.0]), y: np.array([1, 0, 1, 0])}
    found = simplified(value).eval(at)
    assert not np.isfinite(found[0])
    np.testing.assert_allclose(found[1:], log_expit([0.0, 2.0, -2.0]), rtol=1e-14)


def test_what_mixes_rows_or_needs_parameters_is_not_hoisted() -> None:
    x, theta = pt.vector("x"), pt.scalar("theta")
    for value in (pt.exp(x * theta), pt.exp(x.sum()) * x, pt.exp(x[::-1]) * theta, x * theta):
        assert hoisted([value], [x])[1] == []
    value = rewrite_graph(theta * pt.exp(2.0 * x) + pt.log(x), include=("canonicalize",))
    [value], inputs, columns = hoisted([value], [x])
    assert len(inputs) == len(columns) == 2
    assert x not in set(ancestors([value]))
    assert all(isinstance(column.owner.op, Elemwise) for column in columns)


def test_columns_of_columns() -> None:
    y, theta = pt.vector("y"), pt.scalar("theta")
    inner = pt.gammaln(y)
    outer = pt.gammaln(inner)
    both = outer + inner
    value = pt.switch(theta > 0, outer, both)
    [replaced], inputs, columns = hoisted([value], [y])
    assert columns == [outer, both]
    assert y not in set(ancestors([replaced]))
    given = dict(zip(inputs, columns, strict=True))
    [restored] = clone_replace([replaced], given)
    found = pytensor.function([y, theta], [value, restored], mode="FAST_COMPILE")
    for at in (-1.0, 1.0):
        np.testing.assert_array_equal(*found(np.array([3.5, 7.25]), at))


@pytest.mark.parametrize("declare", [bernoulli, poisson, gamma])
def test_rows_have_the_same_bits_wherever_they_stand(declare) -> None:
    rows, z = engine(declare, 0.3), np.array([0.1])
    whole = rows.log_likelihood(z)
    for where in (slice(1, N), slice(3, 8), slice(N - 1, N)):
        assert np.array_equal(rows.part(where).log_likelihood(z), whole[where])


@pytest.mark.slow
def test_operations_on_more_arrays_than_numpy_can_take_are_one_loop() -> None:
    columns = [pt.dvector() for _ in range(40)]
    with pytensor.config.change_flags(cxx=""):
        function = compile_function(columns, pt.exp(sum(columns)))
    nodes = function.maker.fgraph.apply_nodes
    assert [type(node.op.scalar_op) for node in nodes] == [Composite]
    data = RNG.normal(size=(40, 7))
    np.testing.assert_allclose(function(*data), np.exp(data.sum(axis=0)))


def test_functions_of_the_parameters_take_shared_variables(monkeypatch) -> None:
    """Numba's function is called directly only where all that goes in is given."""
    monkeypatch.setattr(functions, "_LARGE_GRAPH", 60)
    theta, values = pt.vector(), pytensor.shared(np.arange(3.0))
    weighted = functions.compile_parameter_function([theta], (theta * values).sum())
    both = functions.compile_parameter_function([theta], [theta.sum(), 2.0 * theta])
    for function in (weighted, pickle.loads(pickle.dumps(weighted))):
        assert function(np.ones(3)) == 3.0
    for function in (both, pickle.loads(pickle.dumps(both))):
        assert function._code is not None
        total, twice = function(np.ones(3))
        assert total == 3.0 and twice.tolist() == [2.0, 2.0, 2.0]
