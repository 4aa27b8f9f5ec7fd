"""Shared values that meet in the rows alone are merged, and the likelihood stays what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_dp.base.matrices import Coordinates
from pymc_dp.base.threads import INTERPRETED
from pymc_dp.records.extraction import Records, extract
from pymc_dp.rows.engine import RowEngine
from pymc_dp.rows.functions import RowFunctions
from pymc_dp.rows.groups import RowGroup
from pymc_dp.rows.nonlinear import merged
from pymc_dp.tuning.effects import effects_of
from tests.selection import marked

N, GROUPS = 301, 5
#: Hundreds of functions, called a few times: interpreted, they need no compilation.
QUICK = {"mode": INTERPRETED}

RNG = np.random.default_rng(11)
G, H = RNG.integers(0, GROUPS, N), RNG.integers(0, GROUPS, N)
X = RNG.normal(size=(N, 3))
Y = RNG.normal(size=N)

Predictor = Callable[[], Any]


def normal(name: str, *shape: int) -> Any:
    return pm.Normal(name, 0.0, 1.0, shape=shape or None)


def scale(name: str = "tau", *shape: int) -> Any:
    return pm.HalfNormal(name, 1.0, shape=shape or None)


def groups() -> Any:
    return normal("mu") + scale() * normal("z", GROUPS)[G]


def product() -> Any:
    return X[:, 0] * normal("a") * normal("b")


def product_first() -> Any:
    return normal("a") * normal("b") * X[:, 0]


def with_predictor() -> Any:
    return groups() + X @ normal("beta", 3)


def with_slope() -> Any:
    """The slope stands between the terms of the group effect."""
    return normal("mu") + X[:, 0] * normal("b") + scale() * normal("z", GROUPS)[G]


def difference() -> Any:
    return normal("mu") - scale() * normal("z", GROUPS)[G] + X[:, 0] * normal("b")


def weighted() -> Any:
    return normal("c") + normal("a") * (X @ normal("beta", 3))


def crossed() -> Any:
    """Two columns of labels: a common intercept belongs to neither."""
    return groups() + scale("omega") * normal("w", GROUPS)[H]


def same_column() -> Any:
    return normal("mu") + normal("z", GROUPS)[G] * normal("w", GROUPS)[G]


def matrix() -> Any:
    effect = normal("mu", 2) + scale("tau", 2) * normal("z", GROUPS, 2)[G]
    return effect[:, 0] + effect[:, 1] * X[:, 0]


def matrix_sum() -> Any:
    effect = normal("mu", 3) + scale("tau", 3) * normal("z", GROUPS, 3)[G]
    return (effect * X).sum(axis=1)


def nested() -> Any:
    """A product over two columns of labels."""
    return scale("tau", GROUPS)[H] * normal("z", GROUPS)[G]


def nested_with_intercept() -> Any:
    return normal("mu") + normal("a") * normal("w", GROUPS)[H] * normal("z", GROUPS)[G]


def two_designs() -> Any:
    return (X[:, :2] @ normal("a", 2)) * (X @ normal("b", 3))


def twice() -> Any:
    """The product says nothing that its factors do not."""
    a, b = normal("a"), normal("b")
    return X[:, 0] * a + X[:, 1] * b + X[:, 2] * a * b


def equal_arrays() -> Any:
    """Labels that are equal by chance are labels of two kinds."""
    return scale("tau", GROUPS)[G.copy()] * normal("z", GROUPS)[G]


def other_sizes() -> Any:
    """The same labels in arrays of two lengths."""
    return normal("w", GROUPS + 1)[G] * normal("z", GROUPS)[G]


def shapes_only() -> Any:
    eta = scale() * normal("z", GROUPS)[G]
    return pt.ones_like(eta) * normal("mu") + eta


def gaussian(predictor: Predictor) -> None:
    pm.Normal("y", predictor(), 1.3, observed=Y)


def gaussian_of_unknown_scale(predictor: Predictor) -> None:
    pm.Normal("y", predictor(), pm.HalfNormal("sigma", 2.0), observed=Y)


def bernoulli(predictor: Predictor) -> None:
    pm.Bernoulli("y", logit_p=predictor(), observed=(Y > 0).astype(int))


def poisson(predictor: Predictor) -> None:
    pm.Poisson("y", pt.exp(predictor()), observed=np.abs(Y).round().astype(int))


FAMILIES = [gaussian, gaussian_of_unknown_scale, bernoulli, poisson]


def each_once(forms: list[Predictor]) -> list[Any]:
    """The first form with all families, the others with one: a family does not look at the form."""
    first = [(forms[0], family) for family in FAMILIES]
    return first + [(form, FAMILIES[k % len(FAMILIES)]) for k, form in enumerate(forms[1:])]


#: Kinds and shapes of the shared values behind the predictor, and the number of effects.
MERGES = {
    groups: ([("index", (GROUPS,))], GROUPS),
    product: ([("copy", ())], 1),
    product_first: ([("copy", ())], 1),
    with_predictor: ([("dot", (3,)), ("index", (GROUPS,))], GROUPS + 3),
    with_slope: ([("copy", ()), ("index", (GROUPS,))], GROUPS + 1),
    difference: ([("copy", ()), ("index", (GROUPS,))], GROUPS + 1),
    weighted: ([("copy", ()), ("dot", (3,))], 4),
    crossed: ([("copy", ()), ("index", (GROUPS,)), ("index", (GROUPS,))], 2 * GROUPS + 1),
    same_column: ([("index", (GROUPS,))], GROUPS),
    matrix: ([("index", (GROUPS, 2))], 2 * GROUPS),
    matrix_sum: ([("index", (GROUPS, 3))], 3 * GROUPS),
    shapes_only: ([("index", (GROUPS,))], GROUPS),
}
APART = [nested, nested_with_intercept, two_designs, twice, equal_arrays, other_sizes]


def records_of(family: Callable[[Predictor], None], predictor: Predictor) -> Records:
    with pm.Model() as model:
        family(predictor)
    return extract(model, check=False)


def plain_engine(records: Records) -> RowEngine:
    """Records in unconstrained parameters."""
    d = records.parameters.size
    return RowEngine.of(records, Coordinates(np.zeros(d), np.eye(d)), QUICK)


def engine_of(records: Records, change: Callable[[Any], Any] = lambda graph: graph) -> RowEngine:
    """The same, their row graphs changed."""
    engine = plain_engine(records)
    changed = [
        RowGroup(
            RowFunctions(change(group.functions.graph), records.parameters, QUICK),
            group.store,
            group.units,
        )
        for group in engine.groups
    ]
    return RowEngine(changed, records.parameters, engine.n_units, engine.coordinates)


def rows(engine: RowEngine, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n,) log-likelihoods and (d, n) scores."""
    vectors = [np.array(block) for _, block in engine.vectors(engine.scores(z))]
    return engine.log_likelihood(z), np.concatenate(vectors, axis=1)


def same_rows(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-9, atol=1e-10)


#: Forms of a predictor, each with one of two families: the other runs with the slow tests, and of
#: the further forms before a version.
FORMS = [groups, with_slope, crossed, matrix, nested, twice]


def crossed_with(families: list[Callable[[Predictor], None]], forms: list[Predictor]) -> list[Any]:
    """All forms with all families, of which one at a time runs always."""
    return marked(
        [(form, family) for form in forms for family in families],
        slow=[(form, families[k % 2]) for k, form in enumerate(forms) if form not in FORMS],
        exhaustive=[(form, families[1 - k % 2]) for k, form in enumerate(forms)],
    )


@pytest.mark.parametrize(
    ("predictor", "family"),
    crossed_with([bernoulli, gaussian_of_unknown_scale], [*MERGES, *APART]),
)
def test_likelihood_and_scores_are_the_same(family: Any, predictor: Predictor) -> None:
    """Merged graphs, as functions of the parameters themselves."""
    records = records_of(family, predictor)
    before, after = engine_of(records), engine_of(records, merged)
    for theta in np.random.default_rng(2).normal(size=(2, before.d)):
        same_rows(rows(after, theta), rows(before, theta))


@pytest.mark.parametrize(("predictor", "family"), each_once(list(MERGES)))
def test_what_merges(family: Any, predictor: Predictor) -> None:
    graph = records_of(family, predictor).groups[0].graph
    found = merged(graph)
    assert (found.leaves, found.lookups, found.conditions) == (
        graph.leaves,
        graph.lookups,
        graph.conditions,
    )
    assert (found.n_rows, found.names) == (graph.n_rows, graph.names)
    kinds = [(cut.kind, cut.phi.type.shape) for cut in found.cuts]
    if family is gaussian_of_unknown_scale:  # its scale, and the logarithm of it
        kinds.remove(("copy", ()))
        kinds.remove(("copy", (1,)))
    assert sorted(kinds) == sorted(MERGES[predictor][0])
    assert all(
        cut.eta.type.shape[1:] == cut.phi.type.shape[cut.kind != "copy" :] for cut in found.cuts
    )
    assert len({cut.eta.name for cut in found.cuts}) == len(found.cuts)
    assert merged(found) is found


@pytest.mark.parametrize(("predictor", "family"), each_once(APART))
def test_what_stays_apart(family: Any, predictor: Predictor) -> None:
    graph = records_of(family, predictor).groups[0].graph
    assert merged(graph) is graph


@pytest.mark.parametrize(("predictor", "family"), crossed_with([gaussian, bernoulli], list(MERGES)))
def test_effects_of_merged_values(family: Any, predictor: Predictor) -> None:
    """They carry the likelihood; scores follow by the chain rule."""
    records = records_of(family, predictor)
    d = records.parameters.size
    outside = plain_engine(records)
    drawn = np.random.default_rng(1).normal(0.0, 0.7, (200, d))
    effects = effects_of(records, outside, drawn, QUICK)
    assert effects is not None and effects.engine.d == MERGES[predictor][1]
    size, function = effects.engine.d, effects.seen.function
    for theta in drawn[:2]:
        inside = effects.engine.with_coordinates(Coordinates(function(theta), np.eye(size)))
        values, scores = rows(inside, np.zeros(size))
        expected = rows(outside, theta)
        jacobian = np.array(
            [(function(theta + 1e-6 * e) - function(theta - 1e-6 * e)) / 2e-6 for e in np.eye(d)]
        )
        np.testing.assert_allclose(values, expected[0], rtol=1e-9)
        np.testing.assert_allclose(
            jacobian @ scores, expected[1], rtol=1e-5, atol=1e-5 * np.abs(expected[1]).max()
        )


@pytest.mark.parametrize("outside", [True, False])
def test_effects_of_a_truncated_hierarchy(outside: bool) -> None:
    """Its log-density has further values of each group, which follow from the group's mean."""
    with pm.Model() as model:
        mu, tau, z = normal("mu"), scale(), normal("z", GROUPS)
        mean = (mu + tau * z)[G] if outside else mu + tau * z[G]
        base = pm.Normal.dist(mean, scale("sigma"))
        pm.Truncated("y", base, lower=0.0, observed=np.abs(Y) + 0.1)
    records = extract(model, check=False)
    drawn = np.random.default_rng(1).normal(0.0, 0.7, (200, records.parameters.size))
    effects = effects_of(records, plain_engine(records), drawn, QUICK)
    assert effects is not None and effects.engine.d == GROUPS + 1


def test_merged_values_that_are_redundant_are_left() -> None:
    """Six products of three parameters: the cuts of the model as written are used instead."""

    def predictor() -> Any:
        a = normal("a", 2)
        places = np.linspace(-1.0, 1.0, GROUPS)
        return normal("c") * (a[0] + pt.exp(a[1]) * places)[G]

    records = records_of(gaussian, predictor)
    d = records.parameters.size
    engine = plain_engine(records)
    assert merged(records.groups[0].graph) is not records.groups[0].graph
    assert effects_of(records, engine, np.random.default_rng(1).normal(size=(50, d)), QUICK) is None


def test_several_groups_of_rows() -> None:
    """Values of one observed variable merge, those of another stay."""

    def declare(_: Predictor) -> None:
        a, b = normal("a"), normal("b")
        pm.Normal("first", X[:, 0] * a * b, 1.0, observed=Y)
        pm.Normal("second", X[:100, 0] * a, 1.0, observed=Y[:100])

    with pm.Model() as model:
        declare(product)
    unit = {"first": np.arange(N), "second": np.arange(100)}
    records = extract(model, privacy_unit=unit, check=False)
    d = records.parameters.size
    engine = plain_engine(records)
    drawn = np.random.default_rng(1).normal(size=(50, d))
    effects = effects_of(records, engine, drawn, QUICK)
    assert effects is not None and effects.engine.d == 2 and effects.seen.n_direct == 1
    theta = drawn[0]
    at = Coordinates(effects.seen.function(theta), np.eye(2))
    inside = effects.engine.with_coordinates(at).log_likelihood(np.zeros(2))
    np.testing.assert_allclose(inside, engine.log_likelihood(theta), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("predictor", "data"),
    [
        pytest.param("sum", False, id="sum-numpy"),
        pytest.param("sum", True, id="sum-data", marks=pytest.mark.exhaustive),
        pytest.param("product", False, id="product-numpy"),
        pytest.param("product", True, id="product-data", marks=pytest.mark.exhaustive),
        pytest.param("column", False, id="column-numpy", marks=pytest.mark.exhaustive),
        pytest.param("column", True, id="column-data"),
    ],
)
def test_number_of_rows_does_not_matter(predictor: str, data: bool) -> None:
    """One user with 5, 9 or 50 rows more, below and above the number of groups."""
    many, users = 40, 30
    found = []
    for more in (5, 9, 11, 50):
        rng = np.random.default_rng(0)
        unit = np.r_[np.arange(users), np.zeros(more, dtype=int)]
        group = np.r_[rng.integers(0, many, users), np.zeros(more, dtype=int)]
        x = np.r_[rng.normal(size=users), np.zeros(more)]
        with pm.Model() as model:
            g = pm.Data("g", group) if data else group
            forms: dict[str, Predictor] = {
                "sum": lambda g=g: normal("mu") + scale() * normal("z", many)[g],
                "product": lambda x=x: x * normal("a") * normal("b"),
                "column": lambda g=g: normal("z", many)[g] * normal("w", many)[g],
            }
            pm.Normal("y", forms[predictor](), 1.0, observed=x)
        records = extract(model, privacy_unit=unit, check=False)
        graph = merged(records.groups[0].graph)
        d = records.parameters.size
        engine = plain_engine(records)
        drawn = np.random.default_rng(1).normal(0.0, 0.7, (50, d))
        effects = effects_of(records, engine, drawn, QUICK)
        assert effects is not None
        found.append(([(c.kind, c.phi.type.shape) for c in graph.cuts], effects.engine.d))
    assert all(one == found[0] for one in found)
    assert len(found[0][0]) == 1
