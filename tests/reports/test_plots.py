"""What pictures show, read back from what is drawn, and that all of it can be read."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy as np
import pymc as pm
import pytest
import xarray as xr
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.privacy.account import STATISTIC
from pymc_dp.privacy.accounting import (
    MU2_UNIT,
    GaussianEvent,
    SubsampledGaussianEvent,
    epsilon_from_mu,
)
from pymc_dp.privacy.plan import make_plan
from pymc_dp.privacy.subsampled import epsilon_of
from pymc_dp.publication.publish import STATEMENT, make_statement
from pymc_dp.reports.posteriors import longest_stay

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:These data already have a budget:UserWarning",
        "ignore:The gradients of this plan:UserWarning",
    ),
]

RNG = np.random.default_rng(4)
Y = np.random.default_rng(2).normal(0.5, 1.0, 400)
DRAWS, CHAINS = 60, 2
ROUND, ANCHOR = GaussianEvent("round 1: score", 20.0), GaussianEvent("anchor", 6.0)


@pytest.fixture(autouse=True)
def agg() -> Iterator[None]:
    before = matplotlib.get_backend()
    plt.switch_backend("Agg")
    style = dict(plt.rcParams)
    yield
    assert dict(plt.rcParams) == style  # a picture changes nothing for the next one
    plt.close("all")
    plt.switch_backend(before)


def normal_model() -> tuple[pm.Model, dp.PrivacyBudget]:
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 2.0)
        pm.Normal("y", mu, 1.0, observed=Y)
        budget = dp.PrivacyBudget(3.0, 1e-6)
    return model, budget


@pytest.fixture(scope="module")
def sampled() -> tuple[pm.Model, dp.PrivacyBudget, Any]:
    """A private run, and its budget."""
    model, budget = normal_model()
    settings = {"scaling": 0.05, "clip_norm": 0.15, "energy_clip": 0.02, "step_size": 0.5}
    with model:
        released = dp.sample(
            draws=DRAWS, chains=CHAINS, cores=1, step_kwargs=settings, progressbar=False
        )
    return model, budget, released


def charge(budget: dp.PrivacyBudget, plan_id: int, sampler: str, events: list[Any]) -> None:
    payload = {"kind": "preparation", "sampler": sampler, "settings": {}, "secure": True}
    budget.account.record_plan(plan_id, payload)
    for event in events:
        budget.account.charge(plan_id, event)


@pytest.fixture(scope="module")
def charged() -> tuple[dp.PrivacyBudget, Any]:
    """A budget with a preparation, a statistic, and chains of which one stopped early.

    With it, a result whose statement says the same.
    """
    _, budget = normal_model()
    account = budget.account
    again = GaussianEvent("round 2: score", 20.0)
    charge(budget, 1, "DPLangevin preparation", [ROUND, again, ANCHOR])
    charge(budget, 2, STATISTIC, [GaussianEvent("sum of ages", 30.0)])
    plan = make_plan(
        "DPLangevin",
        draws=100,
        tune=0,
        chains=2,
        per_iteration={"gradient": 4, "energy_error": 1},
        at_start={},
        available=account.read().remaining // 2,
        shares={"gradient": 0.9, "energy_error": 0.1},
    )
    account.record_plan(plan.plan_id, plan.payload(secure=True))
    account.begin_run(plan.plan_id, max_runs=1, run_cost=plan.run_cost)
    for wants in ((64, 36), (64,)):
        account.begin_chain(plan.plan_id)
        for want in wants:
            assert account.lease(plan.plan_id, plan.iteration_cost, want) == want
    account.give_back(plan.plan_id, plan.iteration_cost, 24)
    statement = make_statement(budget, plan.plan_id, plan.payload(secure=True), [])
    epsilons = np.linspace(1.0, budget.spent().epsilon, 100)
    stats = xr.Dataset({"dp_epsilon": (("chain", "draw"), np.tile(epsilons, (2, 1)))})
    return budget, _compat.inference_data(
        {"sample_stats": stats}, {STATEMENT: json.dumps(statement)}
    )


def statistics(**values: Any) -> Any:
    stats = {name: (("chain", "draw"), np.asarray(x)) for name, x in values.items()}
    return _compat.inference_data({"sample_stats": xr.Dataset(stats)}, {})


def posterior(attrs: dict[str, str] | None = None, **variables: Any) -> Any:
    """A result with (chains, draws, k) values and names of the k by variable."""
    values, coords = {}, {}
    for name, (draws, labels) in variables.items():
        values[name] = (("chain", "draw", f"{name}_of"), draws)
        coords[f"{name}_of"] = labels
    return _compat.inference_data({"posterior": xr.Dataset(values, coords=coords)}, attrs or {})


# -- what every picture must be -------------------------------------------------------------------


def written(ax: Axes) -> list[tuple[str, Any]]:
    """Every text that is drawn, with its extent in pixels."""
    texts: list[Text] = [ax.xaxis.label, ax.yaxis.label, *ax.texts]
    texts += [ax.title, ax._left_title]  # type: ignore[attr-defined]
    for axis in (ax.xaxis, ax.yaxis):
        low, high = sorted(axis.get_view_interval())
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            if low <= tick.get_loc() <= high and tick.label1.get_visible():
                texts.append(tick.label1)
    legends = [ax.get_legend(), *ax.figure.legends]
    texts += [text for legend in legends if legend for text in legend.get_texts()]
    renderer = FigureCanvasAgg(ax.figure).get_renderer()
    found = [text for text in texts if text.get_visible() and text.get_text()]
    return [(text.get_text(), text.get_window_extent(renderer)) for text in found]


def ticks(axis: Any) -> list[Text]:
    """Labels of the major ticks that are seen."""
    low, high = sorted(axis.get_view_interval())
    seen = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [tick.label1 for tick in seen if tick.label1.get_text()]


def assert_legible(*axes: Axes) -> None:
    """All texts lie in the figure and apart from each other; no curve runs under the legend."""
    ax = axes[0]
    figure = ax.figure
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    assert 0.002 < np.mean(pixels.min(axis=2) < 200) < 0.6
    for one in axes:
        assert len(ticks(one.xaxis)) > 1
        assert ticks(one.yaxis) or not len(one.get_yticks())
    texts = list({str(box): (text, box) for one in axes for text, box in written(one)}.values())
    assert len(texts) > 4
    for text, box in texts:
        inside = box.x0 >= -1 and box.y0 >= -1
        inside = inside and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
        assert inside, f"{text!r} is cut off at {figure.get_size_inches()}"
    for (one, a), (two, b) in itertools.combinations(texts, 2):
        apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
        assert apart, f"{one!r} and {two!r} overlap at {figure.get_size_inches()}"
    legend = ax.get_legend()
    if legend is not None:
        box = legend.get_window_extent(canvas.get_renderer())
        assert box.y0 >= ax.bbox.y0 - 1
        for line in ax.get_lines():
            path = line.get_transform().transform_path(line.get_path()).cleaned(remove_nans=True)
            assert not path.intersects_bbox(box, filled=False), f"{line.get_label()!r} is covered"


def assert_picture(draw: Any) -> Axes:
    """Draw it by itself 5 and 10 inches wide, and on axes of the user's; return the last."""
    ax = draw(None)
    for width in (5.0, 10.0):
        ax.figure.set_size_inches(width, ax.figure.get_size_inches()[1])
        assert_legible(ax)
    figure, own = plt.subplots(figsize=(6.4, 4.8))
    assert draw(own) is own
    figure.tight_layout()
    assert_legible(own)
    assert own.get_xlabel() and (own.get_ylabel() or own.get_yticklabels())
    return own


def curve(ax: Axes, label: str) -> tuple[np.ndarray, np.ndarray]:
    """Data of the line whose label begins so, all of it within the limits of the axes."""
    [line] = [line for line in ax.get_lines() if str(line.get_label()).startswith(label)]
    x, y = np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float)
    places = line.get_transform().transform(np.column_stack([x, y])[np.isfinite(y)])
    assert (places >= ax.bbox.min - 1).all() and (places <= ax.bbox.max + 1).all()
    return x, y


def bars(ax: Axes) -> list[tuple[float, float]]:
    return [(bar.get_x(), bar.get_width()) for bar in ax.patches]


# -- budgets --------------------------------------------------------------------------------------


def test_bars_are_the_table_of_the_budget(charged: Any) -> None:
    budget, _ = charged
    ax = assert_picture(lambda ax: dp.plot_budget(budget, ax=ax))
    table = budget.table().set_index("mechanism")["share"]
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == ["rounds 1 to 2", "anchor", "sum of ages", "energy_error", "gradient"]
    found = dict(zip(names, bars(ax), strict=True))
    rounds = table["round 1: score"] + table["round 2: score"]
    assert found["rounds 1 to 2"] == pytest.approx((0.0, rounds))
    for name in names[1:]:
        assert found[name][1] == pytest.approx(table[name], rel=1e-9)
    # each begins where the one before it ends, and the last ends at what was spent
    ends = np.cumsum([width for _, width in bars(ax)])
    np.testing.assert_allclose([left for left, _ in bars(ax)][1:], ends[:-1])
    cap = budget.account.read().cap
    assert ends[-1] == pytest.approx(budget.spent().gdp_mu2 * MU2_UNIT / cap, rel=1e-9)
    assert [text.get_text() for text in ax.texts] == [f"{width:.1%}" for _, width in bars(ax)]
    assert list(curve(ax, "budget: ε = 3, δ = 1e-06")[0]) == [1.0, 1.0]
    assert f"ε = {budget.spent().epsilon:.3g}" in ax.get_xlabel()


@pytest.mark.slow
def test_bars_of_a_statement_add_up_to_what_was_spent(charged: Any, sampled: Any) -> None:
    budget, released = charged
    ax = assert_picture(lambda ax: dp.plot_budget(released, ax=ax))
    names = [label.get_text() for label in ax.get_yticklabels()]
    table = budget.table().set_index("mechanism")["share"]
    assert names == ["3 releases before", "gradient", "energy_error"]
    widths = [width for _, width in bars(ax)]
    before = table["round 1: score"] + table["round 2: score"] + table["anchor"]
    assert widths[0] == pytest.approx(before)
    cap = budget.account.read().cap
    assert sum(widths) == pytest.approx(budget.spent().gdp_mu2 * MU2_UNIT / cap)
    # a run to its end, and nothing beside it: the planned shares are those charged
    _, budget, released = sampled
    ax = dp.plot_budget(released)
    table = budget.table().set_index("mechanism")["share"]
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert dict(zip(names, [width for _, width in bars(ax)], strict=True)) == pytest.approx(
        {name: table[name] for name in ("energy_error", "gradient")}
    )


def test_a_statistic_beside_a_complete_run_is_a_part_of_its_own(sampled: Any) -> None:
    model, budget = normal_model()
    event = GaussianEvent("gradient", 40.0)
    plan = make_plan(
        "DPHMC",
        draws=10,
        chains=1,
        tune=0,
        per_iteration={"gradient": 1},
        at_start={},
        available=None,
        shares={},
        noise_multiplier=40.0,
    )
    account = budget.account
    account.record_plan(plan.plan_id, plan.payload(secure=True))
    account.begin_run(plan.plan_id, max_runs=1, run_cost=plan.run_cost)
    account.begin_chain(plan.plan_id)
    account.lease(plan.plan_id, event.cost, 10)
    charge(budget, 2, STATISTIC, [GaussianEvent("sum", 30.0)])
    statement = make_statement(budget, plan.plan_id, plan.payload(secure=True), [])
    dataset = xr.Dataset(attrs={STATEMENT: json.dumps(statement)})
    ax = dp.plot_budget(dataset)
    cap = account.read().cap
    widths = [width * cap for _, width in bars(ax)]
    assert widths == pytest.approx([10 * event.cost, GaussianEvent("sum", 30.0).cost], rel=1e-6)
    with pytest.raises(ValueError, match=r"spent has no dp_epsilon.*kind='mechanism'"):
        dp.plot_budget(dataset, "time")
    del model


def test_epsilon_over_time_is_that_of_the_ledger(charged: Any) -> None:
    budget, _ = charged
    ax = assert_picture(lambda ax: dp.plot_budget(budget, "time", ax=ax))
    x, epsilons = curve(ax, "DPLangevin preparation")
    mu2 = np.cumsum([ROUND.cost, ROUND.cost, ANCHOR.cost]) / MU2_UNIT
    expected = [epsilon_from_mu(float(np.sqrt(m)), 1e-6) for m in mu2]
    np.testing.assert_array_equal(x, [1, 1, 2, 3])
    np.testing.assert_allclose(epsilons, [expected[0], *expected], rtol=1e-9)
    x, epsilons = curve(ax, STATISTIC)
    assert list(x) == [3, 4] and epsilons[0] == pytest.approx(expected[-1])
    [line] = [line for line in ax.get_lines() if line.get_label() == "DPLangevin"]
    x, epsilons = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    # 100 + 64 - 24 iterations of 5 releases each were kept
    assert x[-1] == 4 + 5 * 140
    assert epsilons[-1] == pytest.approx(budget.spent().epsilon, rel=1e-12)
    assert (np.diff(epsilons) >= 0).all() and (np.diff(x) >= 0).all()
    assert line.get_drawstyle() == "steps-pre" and x[-1] < ax.get_xlim()[1]
    assert list(curve(ax, "budget: ε = 3")[1]) == [3.0, 3.0]


def test_epsilon_over_time_of_a_released_result(sampled: Any) -> None:
    _, budget, released = sampled
    ax = assert_picture(lambda ax: dp.plot_budget(released, "time", ax=ax))
    x, epsilons = curve(ax, "chains")
    stats = _compat.group(released, "sample_stats")["dp_epsilon"].values
    np.testing.assert_array_equal(x, np.arange(1, DRAWS + 1))
    np.testing.assert_array_equal(epsilons, stats[0])
    assert epsilons[-1] == pytest.approx(budget.spent().epsilon, rel=1e-6)


@pytest.mark.slow
def test_batches_are_one_part_of_a_budget() -> None:
    pytest.importorskip("dp_accounting")
    _, budget = normal_model()
    event = SubsampledGaussianEvent("gradient", 2.0, 0.05)
    plan = {"event": event.to_dict(), "releases": 100, "reserved": 2**30}
    budget.account.fix_batches(plan)
    charge(budget, 1, STATISTIC, [GaussianEvent("sum", 30.0)])
    both = epsilon_of([(event, 100)], GaussianEvent("sum", 30.0).cost, 1e-6)
    ax = dp.plot_budget(budget, "time")
    x, epsilons = curve(ax, "releases on batches")
    assert list(x) == [1, 100]
    assert epsilons == pytest.approx(epsilon_of([(event, 100)], 0, 1e-6))
    x, epsilons = curve(ax, STATISTIC)
    assert list(x) == [100, 101] and epsilons[-1] == pytest.approx(both)
    ax = assert_picture(lambda ax: dp.plot_budget(budget, ax=ax))
    cap = budget.account.read().cap
    found = [width * cap for _, width in bars(ax)]
    assert sorted(found) == pytest.approx(sorted([2**30, GaussianEvent("sum", 30.0).cost]))
    ax = dp.plot_epsilon_delta(budget, [1e-6, 1e-4])
    x, deltas = curve(ax, "charged")
    assert x[0] == pytest.approx(both) and list(deltas) == [1e-6, 1e-4]
    # what such a budget may come to is stated at its own delta alone
    assert not [line for line in ax.get_lines() if "whole" in str(line.get_label())]


def test_insecure_noise_is_marked(charged: Any) -> None:
    _, released = charged
    facts = json.loads(_compat.attributes(released)[STATEMENT])
    facts["privacy_guarantee"] = "none"
    marked = xr.Dataset(attrs={STATEMENT: json.dumps(facts)})
    for draw in (dp.plot_budget, dp.plot_epsilon_delta):
        assert "NO PRIVACY GUARANTEE" in assert_picture(
            lambda ax, d=draw: d(marked, ax=ax)
        ).get_title("left")
        assert not draw(released).get_title("left")


# -- epsilon and delta ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_curve_is_the_accountants(charged: Any) -> None:
    budget, released = charged
    deltas = [1e-8, 1e-6, 1e-3]
    cap = budget.account.read().cap
    for spent in (budget, released):
        ax = assert_picture(lambda ax, s=spent: dp.plot_epsilon_delta(s, deltas, ax=ax))
        spent_mu, cap_mu = np.sqrt(budget.spent().gdp_mu2), np.sqrt(cap / MU2_UNIT)
        for label, mu in (("charged", spent_mu), ("the whole budget", cap_mu)):
            x, y = curve(ax, label)
            np.testing.assert_array_equal(y, deltas)
            expected = [epsilon_from_mu(float(mu), delta) for delta in deltas]
            np.testing.assert_allclose(x, expected, rtol=1e-9)
        # the whole budget passes through the point that was stated, what was charged below it
        assert curve(ax, "the whole budget")[0][1] == pytest.approx(3.0, rel=1e-6)
        assert curve(ax, "charged")[0][1] < 3.0
        assert [a.tolist() for a in curve(ax, "budget: ε = 3, δ = 1e-06")] == [[3.0], [1e-6]]
    ax = assert_picture(lambda ax: dp.plot_epsilon_delta(budget, ax=ax))
    x, y = curve(ax, "charged")
    assert len(x) == 60 and y.min() < 1e-9 and (np.diff(x) < 0).all()


def test_the_curve_of_events() -> None:
    event = GaussianEvent("sum", 20.0)
    expected = epsilon_from_mu(0.5, 1e-6)
    for events in ([(event, 100)], [event] * 100):
        ax = assert_picture(lambda ax, e=events: dp.plot_epsilon_delta(e, [1e-6, 1e-5], ax=ax))
        assert curve(ax, "charged, 0.5-GDP")[0][0] == pytest.approx(expected, rel=1e-6)
        assert len(ax.get_lines()) == 1  # nobody promised anything


# -- posteriors -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_densities_of_both_posteriors(sampled: Any) -> None:
    _, _, released = sampled
    draws = np.random.default_rng(3).normal(0.5, 0.05, (4, 300))
    reference = _compat.inference_data(
        {"posterior": xr.Dataset({"mu": (("chain", "draw"), draws)})}, {}
    )
    [ax] = dp.plot_posterior_comparison(released, reference)
    assert_legible(ax)
    x, density = curve(ax, "private, ε = 3, δ = 1e-06")
    mine = _compat.group(released, "posterior")["mu"].values
    width = x[1] - x[0]
    assert density.sum() * width == pytest.approx(1.0, abs=0.05)
    assert (x * density).sum() / density.sum() == pytest.approx(mine.mean(), abs=0.1 * mine.std())
    [area] = ax.collections
    assert area.get_label() == "reference, not private"
    outline = area.get_paths()[0].vertices
    assert outline[outline[:, 1].argmax(), 0] == pytest.approx(0.5, abs=0.03)
    assert ax.get_xlabel() == "mu"
    texts = [text for text, _ in written(ax)]
    assert "reference, not private" in texts and "private, ε = 3, δ = 1e-06" in texts
    # the two change places, and the names with them
    [ax] = dp.plot_posterior_comparison(reference, released)
    assert ax.get_lines()[0].get_label() == "not released"
    assert ax.collections[0].get_label() == "private, ε = 3, δ = 1e-06"


def test_zero_is_not_drawn_where_it_is_far_away() -> None:
    x = RNG.normal(5.0, 0.1, (2, 100, 9))
    [ax] = dp.plot_posterior_comparison(x, x)
    assert ax.get_xlim()[0] > 4 and len(ax.get_lines()) == 2


def test_one_panel_for_each_parameter() -> None:
    x, y = RNG.normal(size=(2, 2, 100, 3))
    panels = dp.plot_posterior_comparison(x, y, labels=("a", "b"))
    assert [ax.get_xlabel() for ax in panels] == ["x[0]", "x[1]", "x[2]"]
    for width in (5.0, 10.0):
        panels[0].figure.set_size_inches(width, 4.5)
        assert_legible(*panels)
    for k, ax in enumerate(panels):
        grid, density = curve(ax, "a")
        assert (grid.min(), grid.max()) == pytest.approx((x[..., k].min(), x[..., k].max()), abs=1)
        assert density.max() > 0.2
    _, own = plt.subplots(2, 2)
    used = dp.plot_posterior_comparison(x, y, axes=own)
    assert list(used) == list(own.ravel()[:3])
    assert used[0].get_legend() is not None and not own[1, 1].has_data()


def test_a_parameter_that_never_moved_is_a_line() -> None:
    [ax] = dp.plot_posterior_comparison(np.full((1, 9), 2.0), RNG.normal(size=(1, 9)))
    assert list(curve(ax, "private")[0]) == [2.0, 2.0]


def test_intervals_of_many_parameters() -> None:
    names = [f"town {k}" for k in range(12)]
    draws = RNG.normal(np.arange(12), 1.0, (2, 500, 12))
    other = RNG.normal(np.arange(12) + 0.5, 2.0, (3, 400, 12))
    order = RNG.permutation(12)
    one = posterior(effect=(draws, names))
    # another order of the same names, and no names at all
    shuffled = posterior(effect=(other[..., order], [names[k] for k in order]))
    unnamed = posterior(effect=(other, np.arange(12)))
    for reference in (shuffled, unnamed):
        ax = assert_picture(
            lambda ax, r=reference: dp.plot_posterior_comparison(one, r, axes=ax)[0]
        )
        assert [label.get_text() for label in ax.get_yticklabels()] == [
            f"effect[{name}]" for name in names
        ]
        medians, rows = curve(ax, "not released"), curve(ax, "reference, not private")
        np.testing.assert_allclose(medians[0], np.median(draws, axis=(0, 1)))
        np.testing.assert_allclose(rows[0], np.median(other, axis=(0, 1)))
        assert ax.get_xlim()[0] < 0 and len(ax.get_lines()) == 3  # with a line at 0
        thin, thick = ax.collections[:2]
        for lines, tails in ((thin, (0.05, 0.95)), (thick, (0.25, 0.75))):
            ends = np.array([path.vertices[:, 0] for path in lines.get_paths()])
            expected = np.quantile(draws, tails, axis=(0, 1)).T
            np.testing.assert_allclose(ends, expected)


# -- forecasts and advice -------------------------------------------------------------------------


@pytest.mark.slow
def test_effective_draws_are_those_of_the_plan(sampled: Any) -> None:
    model, budget = normal_model()
    before = budget.ledger.head()
    epsilons = [0.5, 3.0, 6.0, 12.0]
    steps = ["DPLangevin", dp.DPPenalty]
    ax = assert_picture(
        lambda ax: dp.plot_effective_draws(model, epsilons, step=steps, draws=300, ax=ax)
    )
    assert budget.ledger.head() == before  # nothing was written, let alone spent
    plans = [budget.plan(model, 300, epsilon=epsilon) for epsilon in epsilons]
    assert [plan.form for plan in plans] == ["quadratic", "quadratic", "anchored", "anchored"]
    x, own = curve(ax, "DPLangevin: effective draws")
    np.testing.assert_allclose(x, epsilons)
    np.testing.assert_allclose(own[2:], [plan.effective_draws for plan in plans[2:]])
    assert np.isnan(own[:2]).all()
    normal = curve(ax, "DPLangevin: of a normal approximation")[1]
    np.testing.assert_allclose(normal[:2], [plan.effective_draws for plan in plans[:2]])
    worth = curve(ax, "DPLangevin: worth")[1]
    np.testing.assert_allclose(worth**-0.5, [plan.error for plan in plans])
    other = curve(ax, "DPPenalty: effective draws")[1]
    assert other[-1] == budget.plan(model, 300, step="DPPenalty", epsilon=12.0).effective_draws
    # a budget that is whole has one line; the one that was used up has none for what is left
    [line] = [lines for lines in ax.collections if "budget" in str(lines.get_label())]
    np.testing.assert_allclose(line.get_segments()[0][:, 0], 3.0)
    spent_model, spent_budget, _ = sampled
    ax = dp.plot_effective_draws(spent_budget, epsilons)
    assert spent_budget.remaining().epsilon < 0.05 and len(ax.collections) == 1
    assert dp.get_budget(spent_model) is spent_budget


@pytest.mark.slow
def test_what_is_left_of_a_budget_is_drawn() -> None:
    model, budget = normal_model()
    charge(budget, 1, "preparation", [GaussianEvent("sum", 3.0)])
    ax = assert_picture(lambda ax: dp.plot_effective_draws(budget, [0.5, 1.0, 5.0], ax=ax))
    [line] = [lines for lines in ax.collections if "left" in str(lines.get_label())]
    assert line.get_segments()[0][0, 0] == pytest.approx(budget.remaining().epsilon)
    assert_picture(lambda ax: dp.plot_effective_draws(budget, [1e-4, 1.0, 30.0], ax=ax))
    # the forecast for what is left is the one without an epsilon
    left = budget.plan(model, epsilon=budget.remaining().epsilon)
    rest = budget.plan(model)
    assert (left.epsilon, left.noise_sd) == pytest.approx((rest.epsilon, rest.noise_sd), rel=1e-6)


def test_clip_advice_is_drawn_as_it_is() -> None:
    model, _ = normal_model()
    advice = dp.clip_advice(model, scaling=0.05, draws=20, random_seed=1)
    ax = assert_picture(lambda ax: dp.plot_clip_advice(advice, ax=ax))
    x, above = curve(ax, "simulated, 20 draws")
    np.testing.assert_allclose(x, list(advice.quantiles.values()))
    np.testing.assert_allclose(above, [0.5, 0.1, 0.01, 0.005, 0.001])
    assert curve(ax, "clip_norm")[0][0] == advice.clip_norm
    assert [label.get_text() for label in ax.get_yticklabels()] == ["50", "10", "1", "0.5", "0.1"]
    assert ax.get_xscale() == "linear"
    heavy = type(advice)(50.0, {0.5: 1.0, 0.9: 5.0, 0.995: 50.0, 0.999: 90.0}, 20)
    assert assert_picture(lambda ax: dp.plot_clip_advice(heavy, ax=ax)).get_xscale() == "log"


# -- acceptance -----------------------------------------------------------------------------------


def test_acceptance_and_longest_stays() -> None:
    accepted = RNG.random((3, 200)) < 0.7
    accepted[1, 50:90] = False
    accepted[1, [49, 90]] = True
    ax = assert_picture(lambda ax: dp.plot_acceptance(statistics(dp_accepted=accepted), ax=ax))
    for k in range(3):
        x, rolling = curve(ax, f"chain {k}: {accepted[k].mean():.1%} accepted")
        assert x[0] == 20 and x[-1] == 200
        for end, mean in zip(x.astype(int), rolling, strict=True):
            assert mean == pytest.approx(accepted[k, end - 20 : end].mean())
    assert curve(ax, "chain 1")[1].min() == 0.0
    [line] = [line for line in ax.get_lines() if "chain 1" in str(line.get_label())]
    assert "longest stay 40 draws" in line.get_label()
    # the bar covers draws 51 to 90, counted from 1, whole
    assert bars(ax)[1] == (50.5, 40)
    low, high = ax.get_ylim()
    assert all(low < bar.get_y() < 0 for bar in ax.patches) and high > 1
    x, rolling = curve(dp.plot_acceptance(statistics(dp_accepted=accepted), window=1), "chain 0")
    np.testing.assert_array_equal(rolling, accepted[0])


def test_acceptance_of_a_real_run(sampled: Any) -> None:
    ax = assert_picture(lambda ax: dp.plot_acceptance(sampled[2], ax=ax))
    accepted = _compat.group(sampled[2], "sample_stats")["dp_accepted"].values
    for k in range(CHAINS):
        assert curve(ax, f"chain {k}: {accepted[k].mean():.1%}")[1][-1] == accepted[k, -10:].mean()


def test_frozen_draws_are_left_out() -> None:
    accepted = np.ones((2, 40), dtype=bool)
    frozen = np.zeros_like(accepted)
    accepted[0, 20:], frozen[0, 20:] = False, True
    ax = dp.plot_acceptance(statistics(dp_accepted=accepted, dp_frozen=frozen))
    assert curve(ax, "chain 0: 100.0% accepted, longest stay 0")[0][-1] == 20
    with pytest.raises(ValueError, match="before the budget was used up"):
        dp.plot_acceptance(statistics(dp_accepted=accepted, dp_frozen=~np.zeros_like(frozen)))


def test_many_chains_keep_the_legend_short() -> None:
    accepted = RNG.random((20, 50)) < 0.5
    ax = assert_picture(lambda ax: dp.plot_acceptance(statistics(dp_accepted=accepted), ax=ax))
    assert len(ax.get_legend().get_texts()) == 6 and len(ax.patches) == 20
    looks = [(line.get_color(), line.get_linestyle()) for line in ax.get_lines()[:20]]
    assert len(set(looks)) == 20


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [([1, 1], (0, 0)), ([0, 0], (0, 2)), ([1, 0, 1, 0, 0], (3, 2)), ([0, 0, 1, 0], (0, 2))],
)
def test_longest_stay(accepted: list[int], expected: tuple[int, int]) -> None:
    begin, length = longest_stay(np.array(accepted, dtype=bool))
    assert length == expected[1] and (not length or begin == expected[0])


def test_acceptance_of_records_and_its_bound() -> None:
    moved = RNG.binomial(80, 0.9, (2, 150)) / 80
    log_alpha = RNG.uniform(-2.0, 0.0, (2, 150))
    log_alpha[1, 7] = -2.0  # the bound is reached
    gibbs = statistics(dp_acceptance=moved, dp_min_log_alpha=log_alpha)
    ax = assert_picture(lambda ax: dp.plot_gibbs_acceptance(gibbs, 2.0, ax=ax))
    for k in range(2):
        label = f"chain {k}: {moved[k].mean():.1%} of the records moved"
        np.testing.assert_array_equal(curve(ax, label)[1], moved[k])
    points = [line for line in ax.get_lines() if line.get_marker() == "."]
    for line, expected in zip(points, np.exp(log_alpha), strict=True):
        np.testing.assert_allclose(line.get_ydata(), expected)
    bound = curve(ax, "bound of the proposal “prior”: exp(−ε) = 0.14, ε = 2")[1]
    assert bound == pytest.approx(np.exp(-2.0))
    [below] = ax.patches
    assert below.get_extents().y1 == pytest.approx(ax.transData.transform((0, bound[0]))[1])
    assert ax.get_yscale() == "linear"
    for draw in (
        lambda ax: dp.plot_gibbs_acceptance(gibbs, 2.0, neighboring="add_or_remove_one", ax=ax),
        lambda ax: dp.plot_gibbs_acceptance(gibbs, 4.0, ax=ax),
    ):
        ax = assert_picture(draw)
        assert curve(ax, "bound")[1] == pytest.approx(np.exp(-4.0))
        assert ax.get_yscale() == "log"
    ax = dp.plot_gibbs_acceptance(gibbs)
    assert not [line for line in ax.get_lines() if "bound" in str(line.get_label())]


# -- what is refused ------------------------------------------------------------------------------

SOME = RNG.normal(size=(2, 50))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dp.plot_budget(3.0), "spent must be a PrivacyBudget or a released result"),
        (lambda: dp.plot_budget(normal_model()[1]), "nothing was spent yet: sample first"),
        (lambda: dp.plot_budget(normal_model()[1], "pie"), "kind must be one of"),
        (lambda: dp.plot_epsilon_delta("x"), "spent must be a PrivacyBudget"),
        (lambda: dp.plot_epsilon_delta([]), "spent holds no event"),
        (lambda: dp.plot_epsilon_delta(GaussianEvent("a", 2.0), [1e-6]), "deltas .* at least two"),
        (lambda: dp.plot_epsilon_delta(GaussianEvent("a", 2.0), [0.0, 0.5]), "delta must lie"),
        (lambda: dp.plot_epsilon_delta(GaussianEvent("a", 2.0), ax=3), "ax must be matplotlib"),
        (lambda: dp.plot_posterior_comparison(SOME, posterior()), "both be labelled"),
        (lambda: dp.plot_posterior_comparison(SOME, SOME, "mu"), "var_names are for labelled"),
        (lambda: dp.plot_posterior_comparison(SOME, SOME, kind="box"), "kind must be one of"),
        (lambda: dp.plot_posterior_comparison(SOME, SOME[0]), "reference must have shape"),
        (lambda: dp.plot_posterior_comparison(SOME, SOME * np.nan), "reference must .* finite"),
        (lambda: dp.plot_posterior_comparison(SOME, SOME, labels=("a",)), "labels must be two"),
        (lambda: dp.plot_posterior_comparison(SOME, SOME, axes="ax"), "ax must be matplotlib"),
        (lambda: dp.plot_effective_draws(3.0), "model must be a PyMC model with a budget"),
        (lambda: dp.plot_effective_draws(normal_model()[0], [1.0]), "epsilons .* at least two"),
        (lambda: dp.plot_effective_draws(normal_model()[0], [1.0, -1.0]), "epsilon must be posit"),
        (lambda: dp.plot_effective_draws(normal_model()[0], step="NUTS"), "step must be one of"),
        (lambda: dp.plot_clip_advice(0.3), "advice must be what dp.clip_advice returns"),
        (lambda: dp.plot_acceptance(SOME), "idata must be a result of sampling"),
        (lambda: dp.plot_acceptance(posterior()), "idata has none of the groups"),
        (lambda: dp.plot_acceptance(statistics(lp=SOME)), "idata has no dp_accepted"),
        (lambda: dp.plot_acceptance(statistics(dp_accepted=SOME > 0), window=51), "window must"),
        (lambda: dp.plot_gibbs_acceptance(statistics(lp=SOME)), "idata has no dp_min_log_alpha"),
        (
            lambda: dp.plot_gibbs_acceptance(
                statistics(dp_acceptance=SOME, dp_min_log_alpha=SOME), 0.0
            ),
            "epsilon must be positive",
        ),
    ],
)
def test_wrong_inputs(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
    assert not plt.get_fignums()  # no empty picture is left behind


def test_posteriors_that_do_not_match() -> None:
    draws = RNG.normal(size=(2, 50, 2))
    one = posterior(beta=(draws, ["a", "b"]))
    for reference, message in (
        (posterior(alpha=(draws, ["a", "b"])), "reference has no variable 'beta'"),
        (posterior(beta=(draws[..., :1], ["a"])), "'beta' has shape"),
        (posterior(beta=(draws, ["a", "c"])), "other coordinates"),
    ):
        with pytest.raises(ValueError, match=message):
            dp.plot_posterior_comparison(one, reference)
    with pytest.raises(ValueError, match="private has no variable 'gamma'"):
        dp.plot_posterior_comparison(one, one, "gamma")
    with pytest.raises(ValueError, match="var_names is empty"):
        dp.plot_posterior_comparison(one, one, [])
    with pytest.raises(ValueError, match="axes has 1 panels, but 2"):
        dp.plot_posterior_comparison(one, one, axes=plt.subplots()[1])
    many = RNG.normal(size=(1, 5, 61))
    with pytest.raises(ValueError, match="too many for one picture"):
        dp.plot_posterior_comparison(many, many)


def test_a_result_that_was_not_released_has_no_statement() -> None:
    raw = statistics(dp_epsilon=SOME, dp_accepted=SOME > 0)
    for draw in (dp.plot_budget, dp.plot_epsilon_delta):
        with pytest.raises(dp.UnsafeRelease, match=r"dp\.release"):
            draw(raw)
    with pm.Model() as model:
        pm.Normal("mu")
    with pytest.raises(dp.UnsafeModel, match="PrivacyBudget"):
        dp.plot_effective_draws(model)


def test_matplotlib_is_imported_when_something_is_drawn() -> None:
    pictures = [name for name in sys.modules if name.startswith("pymc_dp.reports.")]
    assert len(pictures) > 3
    for name in pictures:
        assert not {"plt", "matplotlib", "Axes"} & set(vars(sys.modules[name])), name
