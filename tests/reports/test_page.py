"""The page about a release, and what budgets and forecasts show in a notebook."""

from __future__ import annotations

import base64
import json
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pymc as pm
import pytest
import xarray as xr
from matplotlib import pyplot as plt

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.publication.publish import STATEMENT
from pymc_dp.reports import page

pytestmark = pytest.mark.filterwarnings(
    "ignore:Only", "ignore:The gradients of this plan", "ignore:These data already have a budget"
)

N = 4177  # private under add_or_remove_one
VALUE, CONSTANT, PERSON = 123456.789, 0.7362819, "Grace Hopper"
LABEL = "<script>alert(1)</script> & co"
SETTINGS = {"scaling": 0.05, "clip_norm": 0.15, "energy_clip": 0.02, "step_size": 0.5}
VOID = {"meta", "img", "br"}


def private_model(neighboring: str) -> pm.Model:
    """Every number and name in it is private but those of the parameters."""
    y = np.random.default_rng(2).normal(0.5, 1.0, N)
    y[7] = VALUE
    coords = {"record": [PERSON] * N, "group": [PERSON, "b"]}
    with pm.Model(coords=coords) as model:
        x = pm.Data("x", np.full(N, CONSTANT), dims="record")
        mu, beta = pm.Normal("mu", 0.0, 2.0), pm.Normal("beta", 0.0, CONSTANT, dims="group")
        pm.Deterministic("fitted", mu + beta[0] * x, dims="record")
        pm.Deterministic("scaled", mu * VALUE)
        pm.Normal("y", mu + beta[1] * x, 1.0, observed=y, dims="record")
        n_public = 4000 if neighboring == "add_or_remove_one" else None
        dp.PrivacyBudget(3.0, 1e-6, dataset=LABEL, neighboring=neighboring, n_public=n_public)
    return model


@pytest.fixture(scope="module", params=["replace_one", "add_or_remove_one"])
def private(request: pytest.FixtureRequest) -> tuple[pm.Model, Any]:
    """A model, and a private run of it."""
    model = private_model(request.param)
    with model:
        released = dp.sample(
            30, chains=2, cores=1, step_kwargs=SETTINGS, progressbar=False, random_seed=1
        )
    return model, released


@pytest.fixture(scope="module")
def released() -> Any:
    """A result made of a statement, and of draws of an anchored run, by hand."""
    with pm.Model():
        pm.Normal("y", pm.Normal("mu", 0.0, 2.0), 1.0, observed=np.zeros(50))
        dp.PrivacyBudget(3.0, 1e-3)
        run = dp.sample(
            30, chains=2, cores=1, step_kwargs=SETTINGS, progressbar=False, random_seed=1
        )
    draws = np.random.default_rng(1).normal(size=(2, 50, 3))
    raw = xr.Dataset({"mu": (("chain", "draw", "group"), draws)})
    groups = {
        "posterior": raw + 5.0,
        "posterior_raw": raw,
        "sample_stats": _compat.group(run, "sample_stats"),
    }
    return _compat.inference_data(groups, _compat.attributes(run))


def restated(released: Any, **facts: Any) -> Any:
    """The result with other facts in its statement."""
    statement = json.dumps(dp.statement_facts(released) | facts)
    groups = {name: _compat.group(released, name) for name in _compat.group_names(released)}
    return _compat.inference_data(groups, {**_compat.attributes(released), STATEMENT: statement})


class Page(HTMLParser):
    """What a reader of the page meets: text, tables by caption, and whether tags are closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.tables: dict[str, list[list[str]]] = {}
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "caption":
            self.caption = ""
        if tag == "tr":
            self.tables[self.caption].append([])
        if tag in ("td", "th"):
            self.tables[self.caption][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "caption":
            self.tables[self.caption] = []

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] == "style":
            return
        self.text += data
        if self.open[-1] == "caption":
            self.caption += data
        if self.open[-1] in ("td", "th"):
            self.tables[self.caption][-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def written(tmp_path: Path, *arguments: Any, **options: Any) -> tuple[str, Page]:
    file = dp.report(arguments[0], tmp_path / "report.html", *arguments[1:], **options)
    assert isinstance(file, Path)
    html = file.read_text(encoding="utf-8")
    return html, Page(html)


# -- what the page holds --------------------------------------------------------------------------


def test_what_the_page_says(private: tuple[pm.Model, Any], tmp_path: Path) -> None:
    model, released = private
    facts = dp.statement_facts(released)
    _, page = written(tmp_path, released, model=model)
    for line in dp.privacy_statement(released).splitlines():
        assert line.strip() in page.text
    promise = dict(page.tables["What is promised"])
    assert promise["Epsilon"] == "3"
    assert promise["Mu of Gaussian differential privacy"] == f"{facts['gdp_mu']:.4g}"
    assert facts["neighboring"] in promise["Neighbouring data sets"]
    n = f"{N:,}" if facts["neighboring"] == "replace_one" else "private"
    assert promise["Number of units, n"] == n
    assert promise["Data set"] == LABEL
    charges = {row[1]: row for row in page.tables["What was charged, by mechanism"]}
    assert charges["gradient"][2] == "60"
    noise = facts["mechanisms"]["gradient"]["noise_multiplier"]
    assert charges["gradient"][3] == f"{noise:.4g}"
    shares = [float(row[4].rstrip("%")) for row in charges.values() if row[4].endswith("%")]
    assert sum(shares) == pytest.approx(100.0, abs=0.2)
    header, *rows = page.tables["Summary of the draws"]
    assert [row[0] for row in rows] == ["mu", "beta[0]", "beta[1]"]
    mean = float(_compat.group(released, "posterior")["mu"].mean())
    assert rows[0][header.index("mean")] == f"{mean:.4g}"
    variables = {name: rest for name, *rest in page.tables["Variables"]}
    assert variables["beta"] == ["Normal", "group (2)", "released"]
    assert variables["y"] == ["Normal", "record", "private"]
    assert variables["x"] == ["Data", "record", "private"]
    assert variables["fitted"] == ["Deterministic", "record", "not released"]
    assert dict(page.tables["Settings of the sampler, as planned"])["Step size"] == "0.5"
    assert page.tables["Versions"][1] == ["pymc_dp", dp.__version__, dp.__version__]
    assert dict(page.tables["Chains, and warnings"])["Draws that were kept"] == "2 chains of 30"


def test_nothing_private_is_in_the_page(private: tuple[pm.Model, Any], tmp_path: Path) -> None:
    model, released = private
    html, page = written(tmp_path, released, model=model)
    [image] = page.all("img")
    assert image["src"] is not None
    picture = base64.b64decode(image["src"].partition("base64,")[2]).decode()
    labels = re.findall("<!--(.*?)-->", picture, flags=re.DOTALL)  # text is drawn as outlines
    assert any("gradient" in label for label in labels)
    text = html.replace(image["src"], "") + " ".join(labels)
    secrets = [f"{VALUE:.0f}"[:5], f"{VALUE:,.0f}"[:5], str(CONSTANT)[2:], *PERSON.split()]
    if dp.statement_facts(released)["neighboring"] == "add_or_remove_one":
        secrets += [str(N), f"{N:,}"]
    assert [secret for secret in secrets if secret in text] == []


def test_labels_are_text(private: tuple[pm.Model, Any], tmp_path: Path) -> None:
    _, released = private
    html, page = written(tmp_path, released, title='A <b>bold</b> "title"')
    assert page.all("script") == page.all("b") == []
    assert "<script" not in html and escape(LABEL) in html
    assert 'A <b>bold</b> "title"' in page.text
    assert f"Private posterior of {LABEL}" in written(tmp_path, released)[1].text


def test_the_page_stands_alone_and_can_be_read(released: Any, tmp_path: Path) -> None:
    html, page = written(tmp_path, released)
    assert html.startswith("<!DOCTYPE html>")
    assert page.open == []
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("title")) == 1
    assert len(page.all("h2")) == len(page.all("section"))
    assert len(page.all("caption")) == len(page.all("table")) == len(page.tables)
    assert all(attrs.get("scope") in ("row", "col") for attrs in page.all("th"))
    assert all(attrs["alt"] and attrs["src"][:5] == "data:" for attrs in page.all("img"))
    assert {"charset": "utf-8"} in page.all("meta")
    assert any(attrs.get("name") == "viewport" for attrs in page.all("meta"))
    assert not {"script", "link", "iframe", "a", "object"} & {tag for tag, _ in page.tags}
    assert "url(" not in html and "http:" not in html and "https:" not in html
    first = html
    assert written(tmp_path, released)[0] == first  # without a date


def test_chains_are_judged_by_their_own_draws(released: Any, tmp_path: Path) -> None:
    _, page = written(tmp_path, released)
    header, *rows = page.tables["Summary of the draws"]
    raw, draws = (_compat.group(released, name)["mu"] for name in ("posterior_raw", "posterior"))
    ess = _compat.effective_draws(raw.values)
    assert [float(row[header.index("ess_bulk")]) for row in rows] == pytest.approx(ess, rel=1e-3)
    means = [float(row[header.index("mean")]) for row in rows]
    assert means == pytest.approx(draws.values.mean((0, 1)), rel=1e-3)
    chains = dict(page.tables["Chains, and warnings"])
    assert chains["Fewest effective draws (bulk)"] == f"{min(ess):.4g}, of mu[{np.argmin(ess)}]"
    assert "posterior_raw" in chains["R-hat, effective draws"]


def test_warnings_stand_out(released: Any, tmp_path: Path) -> None:
    calm = restated(released, dataset="NHS UK")  # no warning, for all its capitals
    _, page = written(tmp_path, calm)
    assert ["Warning in the statement", "none"] in page.tables["Chains, and warnings"]
    assert page.all("p").count({"class": "warning"}) == 0
    sentences = ["All is well. ABOUT AS WIDE AS THEIR PRIOR: mu.", "UNRELIABLE: far away."]
    warned = restated(released, draws_are=sentences)
    _, page = written(tmp_path, warned)
    rows = [row[1] for row in page.tables["Chains, and warnings"] if row[0].startswith("Warn")]
    assert rows == ["ABOUT AS WIDE AS THEIR PRIOR: mu.", "UNRELIABLE: far away."]
    assert page.all("p").count({"class": "warning"}) == 2
    _, page = written(tmp_path, restated(released, privacy_guarantee="none"))
    assert page.tables["What is promised"] == [["Guarantee", "NONE: made with insecure test noise"]]
    assert {"class": "warning"} in page.all("p")


def test_what_the_steward_can_run(released: Any, tmp_path: Path) -> None:
    _, page = written(tmp_path, released)
    assert "was temporary, and can no longer be checked" in page.text
    _, page = written(tmp_path, restated(released, ledger="persistent"))
    head = dp.statement_facts(released)["ledger_head"]
    assert f"python -m pymc_dp ledger verify FILE --head {head}" in page.text


def test_few_draws_and_many_parameters(
    released: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = _compat.group(released, "posterior").isel(draw=slice(2))
    _, table = written(tmp_path, short.assign_attrs(_compat.attributes(released)))
    assert "ess_bulk" not in table.tables["Summary of the draws"][0]
    monkeypatch.setattr(page, "_MOST", 2)
    _, table = written(tmp_path, released)
    assert len(table.tables["Summary of the draws, the first 2 of 3 parameters"]) == 1 + 2


def test_a_mode(released: Any, tmp_path: Path) -> None:
    """As `dp.find_MAP` returns it, whose own test writes a page, too."""
    values = {"mu": (("estimate", "group"), np.array([[0.1, -2.5], [0.3, 1.2]]))}
    mode = xr.Dataset(values, coords={"estimate": ["mode", "sd"]})
    mode = mode.assign_attrs(_compat.attributes(released))
    _, page = written(tmp_path, mode)
    header, *rows = page.tables["Summary of the draws"]
    assert header == ["Parameter", "mode", "sd"]
    assert [row[0] for row in rows] == ["mu[0]", "mu[1]"]
    values = [[float(x) for x in row[1:]] for row in rows]
    np.testing.assert_allclose(np.transpose(values), mode["mu"], rtol=1e-3)


def test_drawing_changes_nothing(released: Any, tmp_path: Path) -> None:
    with plt.style.context("dark_background"):
        before, figures = dict(plt.rcParams), plt.get_fignums()
        html, _ = written(tmp_path, released)
        assert dict(plt.rcParams) == before and plt.get_fignums() == figures
    assert matplotlib.rcParams["figure.facecolor"] == "white"
    assert written(tmp_path, released)[0] == html


# -- what is refused ------------------------------------------------------------------------------


def test_what_was_not_released(private: tuple[pm.Model, Any], tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    draws = xr.Dataset({"mu": (("chain", "draw"), np.zeros((2, 10)))})
    for unsafe in (_compat.inference_data({"posterior": draws}, {}), draws, {"mu": 1.0}, None):
        with pytest.raises(dp.UnsafeRelease):
            dp.report(unsafe, file)
    attrs = _compat.attributes(private[1])
    with pytest.raises(ValueError, match="no group posterior"):
        dp.report(_compat.inference_data({"posterior_predictive": draws}, attrs), file)
    assert not file.exists()


def test_paths_that_cannot_be_written(released: Any, tmp_path: Path) -> None:
    for path in (tmp_path, 3, None):
        with pytest.raises(ValueError, match="path must be a file"):
            dp.report(released, path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be written: No such file"):
        dp.report(released, tmp_path / "nowhere" / "report.html")


def test_a_model_of_something_else(released: Any, tmp_path: Path) -> None:
    with pm.Model() as other:
        pm.Normal("nu")
    with pytest.raises(ValueError, match=r"no variable \['mu'\]"):
        dp.report(released, tmp_path / "report.html", model=other)
    with pytest.raises(ValueError, match="model must be a PyMC model, not str"):
        dp.report(released, tmp_path / "report.html", model="other")  # type: ignore[arg-type]


# -- statements as data, and notebooks ------------------------------------------------------------


def test_the_statement_as_data(released: Any) -> None:
    facts = dp.statement_facts(released)
    assert facts == json.loads(_compat.attributes(released)[STATEMENT])
    assert dp.statement_facts(_compat.group(released, "posterior")) == facts
    assert f"({facts['epsilon']:g}, {facts['delta']:g})" in dp.privacy_statement(released)
    facts.clear()
    assert dp.statement_facts(released)["epsilon"] == 3.0
    with pytest.raises(dp.UnsafeRelease):
        dp.statement_facts(_compat.group(released, "posterior").drop_attrs())


def test_budgets_and_forecasts_in_a_notebook(private: tuple[pm.Model, Any]) -> None:
    model, _ = private
    budget = dp.get_budget(model)
    assert budget is not None
    with pytest.raises(dp.BudgetExceeded, match="is used up, so there is nothing to plan"):
        budget.plan(model)
    plan = budget.plan(model, epsilon=1.0)
    for html in (budget._repr_html_(), plan._repr_html_()):
        found = re.sub("<[^>]*>", "", html)
        assert "<script" not in html
        secrets = [PERSON, str(CONSTANT), f"{VALUE:.0f}"[:5]]
        if budget.neighboring == "add_or_remove_one":
            secrets += [str(N), f"{N:,}"]
        assert [secret for secret in secrets if secret in found] == []
    assert escape(LABEL) in budget._repr_html_()
    assert "<td>gradient</td>" in budget._repr_html_()
    assert plan.advice in plan._repr_html_()
