"""Solves with constant matrices, written out as sums of products."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest
from pytensor.graph.traversal import ancestors
from pytensor.tensor.blockwise import Blockwise
from scipy.stats import multivariate_normal

from pymc_dp.base.compat import SolveTriangular
from pymc_dp.base.matrices import Coordinates
from pymc_dp.records.extraction import extract
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import constant_solves

N = 1009


def _data(k: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(k)
    root = rng.normal(size=(k, k)) + 2.0 * np.eye(k)
    return root @ root.T, rng.normal(size=(N, k)) @ root.T


def _solves(value) -> int:
    ops = [v.owner.op for v in ancestors([value]) if v.owner is not None]
    return sum(isinstance(o, Blockwise) and isinstance(o.core_op, SolveTriangular) for o in ops)


@pytest.mark.parametrize(
    "given",
    ["cov", *(pytest.param(given, marks=pytest.mark.exhaustive) for given in ("tau", "chol"))],
)
def test_log_likelihood_and_scores(given: str) -> None:
    k = 4
    cov, x = _data(k)
    matrix = {"cov": cov, "tau": np.linalg.inv(cov), "chol": np.linalg.cholesky(cov)}[given]
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 3.0, shape=k)
        pm.MvNormal("x", mu, **{given: matrix}, observed=x)
    records = extract(model, check=False)
    graph = records.groups[0].graph
    if given != "tau":
        assert _solves(graph.loglik) and not _solves(constant_solves(graph.loglik))
    at = np.array([0.3, -1.0, 0.5, 2.0])
    engine = RowEngine.of(records, Coordinates(at, np.eye(k)))
    expected = multivariate_normal(at, cov).logpdf(x)
    np.testing.assert_allclose(engine.log_likelihood(np.zeros(k)), expected, rtol=1e-10)
    [(_, scores)] = list(engine.vectors(engine.scores(np.zeros(k))))
    np.testing.assert_allclose(scores, np.linalg.solve(cov, (x - at).T), rtol=1e-8, atol=1e-10)


def test_a_matrix_that_depends_on_parameters_is_left_alone() -> None:
    cov, x = _data(3)
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 1.0)
        pm.MvNormal("x", np.zeros(3), chol=scale * np.linalg.cholesky(cov), observed=x)
    graph = extract(model, check=False).groups[0].graph
    assert constant_solves(graph.loglik) is graph.loglik


def test_rows_have_the_same_bits_wherever_they_stand() -> None:
    cov, x = _data(7)
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 3.0, shape=7)
        pm.MvNormal("x", mu, cov=cov, observed=x)
    engine = RowEngine.of(extract(model, check=False), Coordinates(np.full(7, 0.1), np.eye(7)))
    whole = engine.log_likelihood(np.zeros(7))
    [(_, vectors)] = list(engine.vectors(engine.scores(np.zeros(7))))
    for where in (slice(1, N), slice(3, 8), slice(N - 1, N)):
        part = engine.part(where)
        assert np.array_equal(part.log_likelihood(np.zeros(7)), whole[where])
        [(_, some)] = list(part.vectors(part.scores(np.zeros(7))))
        assert np.array_equal(some, vectors[:, where])
