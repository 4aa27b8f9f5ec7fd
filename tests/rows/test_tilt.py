"""Tilted records: changes of scores against a reference, exactly zero there."""

from __future__ import annotations

import numpy as np
import pytest

from pymc_dp.rows import groups, loops
from pymc_dp.rows.engine import RowEngine
from tests.records.test_records import compiled, evaluate, quick, same_bits, with_data
from tests.rows.test_contributions import coordinates
from tests.selection import marked

#: Constant maps, varying maps, both in one model, several rows per unit, several groups.
NAMES = ["logistic", "random_slopes", "neural_network", "non_centred_groups", "persons"]
NAMES += ["two_lengths", "two_observed"]


def pair(name: str) -> tuple[RowEngine, RowEngine]:
    engine = quick(name)[2].with_coordinates(coordinates(name))
    return engine, engine.tilted()


@pytest.mark.parametrize("name", NAMES)
def test_linearisation_is_taken_away(name: str) -> None:
    engine, tilted = pair(name)
    rng = np.random.default_rng(6)
    z, displacement = 0.3 * rng.standard_normal((2, engine.d))
    scale = rng.uniform(size=engine.n_units)
    at_zero = evaluate(engine, np.zeros(engine.d))[1]
    values, vectors = evaluate(engine, z)
    found_values, found = evaluate(tilted, z)
    tight = {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(found_values, values - at_zero @ z, **tight)
    np.testing.assert_allclose(found, vectors - at_zero, **tight)
    np.testing.assert_allclose(
        tilted.work(tilted.scores(z), z, z + displacement, scale),
        scale * ((vectors - at_zero) @ displacement),
        **tight,
    )
    assert not evaluate(tilted, np.zeros(engine.d))[1].any()
    assert (tilted.d, tilted.n_units) == (engine.d, engine.n_units)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_that_of_the_log_likelihood(name: str) -> None:
    _, tilted = pair(name)
    rng = np.random.default_rng(7)
    z, direction = 0.3 * rng.standard_normal((2, tilted.d))
    h = 1e-5
    slope = (
        tilted.log_likelihood(z + h * direction) - tilted.log_likelihood(z - h * direction)
    ) / (2 * h)
    # truncation h^2, cancellation 1e-16/h times log-likelihoods up to 1e3
    np.testing.assert_allclose(evaluate(tilted, z)[1] @ direction, slope, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "name", marked(["logistic", "poisson_groups", "neural_network"], slow=["neural_network"])
)
def test_a_kept_design_changes_no_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    z = np.random.default_rng(8).standard_normal(compiled(name).d)
    found = []
    for worth in (0, 10**9):
        monkeypatch.setattr(loops, "_WORTH", worth)
        compiled(name).release_memory()
        engine = compiled(name).with_coordinates(coordinates(name))
        found.append(evaluate(engine.tilted(), z))
        assert bool(engine._designs) == (worth == 0)
        assert engine.__getstate__()["_designs"] == {}
    for k in range(2):
        np.testing.assert_allclose(*(values[k] for values in found), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("worth", [0, 10**9])
@pytest.mark.parametrize(
    "name", marked(["logistic", "poisson_groups", "neural_network"], slow=["neural_network"])
)
def test_bits_do_not_depend_on_place_or_block(
    name: str, worth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "_WORTH", worth)
    engine = compiled(name).with_coordinates(coordinates(name))
    z = np.random.default_rng(8).standard_normal(engine.d)
    order = np.random.default_rng(3).permutation(engine.n_units)
    whole = evaluate(engine.tilted(), z)
    for size in (7, 16, 8192):
        monkeypatch.setattr(groups, "BLOCK", size)
        moved = evaluate(with_data(engine, lambda a: a[order]).tilted(), z)
        for k in range(2):
            assert same_bits(moved[k], whole[k][order])


@pytest.mark.parametrize("name", marked(["logistic", "neural_network"], slow=["neural_network"]))
def test_a_changed_record_leaves_the_bits_of_all_others(name: str) -> None:
    engine = compiled(name).with_coordinates(coordinates(name))
    z = np.random.default_rng(9).standard_normal(engine.d)

    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[11] = array[42]
        return array

    before = evaluate(engine.tilted(), z)
    after = evaluate(with_data(engine, change).tilted(), z)
    others = np.arange(engine.n_units) != 11
    for k in range(2):
        assert same_bits(before[k][others], after[k][others])
        assert not same_bits(before[k], after[k])


def test_records_are_read_at_the_first_question_and_the_reference_stays() -> None:
    engine = with_data(compiled("logistic"), lambda a: a)
    tilted = engine.tilted()
    assert tilted.reads == 0
    assert tilted.synthetic().log_likelihood(np.zeros(engine.d)).shape == (tilted.n_units,)
    assert tilted.reads == 0
    tilted.log_likelihood(np.zeros(engine.d))
    assert tilted.reads > 0
    reference = tilted.reference()
    tilted.scores(np.ones(engine.d))
    assert tilted.reference() is reference
    assert tilted.__getstate__()["_reference"] is None
    assert engine.tilted().with_coordinates(coordinates("logistic"))._reference is None


@pytest.mark.parametrize("worth", [0, 10**9])
def test_a_part_has_the_bits_of_the_whole(worth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_WORTH", worth)
    engine = compiled("logistic").with_coordinates(coordinates("logistic"))
    z = np.random.default_rng(8).standard_normal(engine.d)
    whole = evaluate(engine.tilted(), z)
    part = evaluate(engine.tilted().part(slice(13, 40)), z)
    for k in range(2):
        assert same_bits(part[k], whole[k][13:40])
    monkeypatch.setattr(loops, "LARGEST", 0)  # nothing is kept: the number of rows may be private
    found = evaluate(engine.with_coordinates(engine.coordinates).tilted(), z)
    for k in range(2):
        assert same_bits(found[k], whole[k])
