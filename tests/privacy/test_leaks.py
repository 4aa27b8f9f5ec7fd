"""Planted secrets - values, ids, names - come out nowhere but through a mechanism."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
import xarray as xr

import pymc_dp as dp
from pymc_dp.base import compat as _compat
from pymc_dp.errors import PrivacyError, UnsafeRelease
from pymc_dp.privacy.noise import insecure_noise
from pymc_dp.publication.publish import releasable
from tests.privacy.toy import DELTA, SETTINGS, logistic_model, make_step, sample

pytestmark = pytest.mark.filterwarnings(
    "ignore:The gradients of this plan:UserWarning",
    "ignore:These data already have a budget:UserWarning",
    "ignore:More chains:UserWarning",
)
N = 37
PUBLIC_STATS = {"dp_accepted", "dp_epsilon", "dp_plan_id"}
RAW_STATS = PUBLIC_STATS | {"dp_accept_rate", "dp_frozen"}


class Secrets:
    """Values that no computation makes by chance, and the search for them."""

    def __init__(self, seed=11):
        rng = np.random.default_rng(seed)
        self.x = rng.uniform(-1, 1, (N, 2))
        self.w = rng.uniform(2, 3, N)
        self.y = rng.integers(10**9, 2 * 10**9, N)  # PyMC holds counts in 32 bits
        self.ids = rng.integers(10**15, 10**16, N)
        self.names = [f"Zyxwv Planted{k:03d}" for k in range(N)]

    @property
    def numbers(self):
        return [self.x, self.w, self.y, self.ids, self.x.mean(0), self.w.mean(), self.y.mean()]

    @property
    def patterns(self):
        found = [b"Zyxwv", "Zyxwv".encode("utf-16-le"), "Zyxwv".encode("utf-32-le")]
        for array in self.numbers:
            for value in np.ravel(array):
                found.append(value.tobytes())
                text = repr(value.item())
                found.append(text[: max(len(text) - 3, 9)].encode())
        return [p for p in dict.fromkeys(found) if len(p) >= 5]

    def in_bytes(self, data: bytes) -> list[bytes]:
        return [pattern for pattern in self.patterns if pattern in data]

    def in_text(self, *texts: str) -> list[bytes]:
        return self.in_bytes("\n".join(texts).encode())

    def in_result(self, result) -> list:
        """In every number, whatever its type, and every word of a result."""
        found = self.in_bytes(pickle.dumps(result)) + self.in_text(str(result), repr(result))
        secret = np.concatenate([np.ravel(array).astype(float) for array in self.numbers])
        found += self.in_text(json.dumps(result.attrs, default=str))
        for name in _compat.group_names(result):
            dataset = _compat.group(result, name)
            found += self.in_text(json.dumps(dataset.attrs, default=str))
            for key, variable in dataset.variables.items():
                values = np.ravel(variable.values)
                found += self.in_text(json.dumps(variable.attrs, default=str), *map(str, values))
                if values.dtype.kind in "iufb":
                    near = np.isin(np.float32(values), np.float32(secret))
                    found += [(name, key, value) for value in values[near]]
        return found


SECRETS = Secrets()


def planted_model(*, people=True, **budget) -> pm.Model:
    s = SECRETS
    with pm.Model(coords={"person": s.names, "term": ["Zyxwv term0", "Zyxwv term1"]}) as model:
        a = pm.Normal("a", 0, 2)
        b = pm.Normal("b", 0, 2, dims="term")
        w = pm.Data("w", s.w, dims="person")
        rate = pm.Deterministic("rate", a + s.x @ b + w * a, dims="person")
        pm.Deterministic("odds", pm.math.exp(a - b.sum()))
        pm.Deterministic("first", s.x[:3] @ b)
        pm.Poisson("y", mu=pm.math.exp(rate), observed=s.y, dims="person")
        arguments = {"epsilon": 5.0, "delta": DELTA, "privacy_unit": s.ids if people else None}
        dp.PrivacyBudget(**arguments | budget)
    return model


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """One raw and one released run of the same step, and all that was said meanwhile."""
    messages = []

    class Handler(logging.Handler):
        def emit(self, record):
            messages.append(self.format(record))

    handler = Handler(level=logging.DEBUG)
    root, pymc_log = logging.getLogger(), logging.getLogger("pymc")
    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    dp.Ledger.create(path, dataset="wave 3")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        root.addHandler(handler)
        pymc_log.addHandler(handler)
        try:
            model = planted_model(ledger=path)
            step = make_step(model, "DPHMC", draws=6, chains=2, runs=2)
            raw = pm.sample(
                draws=6, tune=0, chains=2, cores=1, step=step, model=model, random_seed=1
            )
            safe = dp.sample(6, tune=0, chains=2, cores=1, step=step, model=model, random_seed=1)
        finally:
            root.removeHandler(handler)
            pymc_log.removeHandler(handler)
    messages += [str(warning.message) for warning in caught]
    return {
        "model": model,
        "step": step,
        "raw": raw,
        "safe": safe,
        "ledger": path,
        "messages": messages,
    }


@pytest.mark.slow
def test_the_search_finds_what_a_raw_result_holds(session):
    """Without this the other tests could pass by not seeing."""
    found = SECRETS.in_result(session["raw"])
    assert set(SECRETS.patterns) & set(found)
    assert b"Zyxwv" in found
    for array in (SECRETS.x[:1] * 1.0, SECRETS.w, SECRETS.y):
        pattern = np.ravel(array)[0].tobytes()
        assert SECRETS.in_bytes(b"..." + pattern) == [pattern]


def test_sample_and_release_return_no_secret(session):
    safe = session["safe"]
    assert SECRETS.in_result(safe) == []
    released = dp.release(session["raw"], session["model"])
    assert SECRETS.in_result(released) == []
    for result in (safe, released):
        assert set(_compat.group_names(result)) == {"posterior", "sample_stats"}
        assert set(_compat.group(result, "posterior").data_vars) == {"a", "b", "odds"}
        assert set(_compat.group(result, "sample_stats").data_vars) == PUBLIC_STATS


def test_undeclared_coords_are_numbered_and_declared_ones_kept(session):
    coords = _compat.group(session["safe"], "posterior").coords
    np.testing.assert_array_equal(coords["term"], [0, 1])
    assert set(coords) == {"chain", "draw", "term"}
    with pm.Model(coords={"term": ["x1", "x2"]}) as model:
        b = pm.Normal("b", 0, 1, dims="term")
        pm.Bernoulli("y", logit_p=SECRETS.x @ b, observed=SECRETS.y % 2)
        dp.PrivacyBudget(5.0, DELTA, public=["term"])
    safe = dp.release(sample(model, make_step(model)), model)
    assert list(_compat.group(safe, "posterior").coords["term"].values) == ["x1", "x2"]


def test_our_sample_stats_are_public(session):
    stats = _compat.group(session["raw"], "sample_stats")
    assert set(stats.data_vars) == RAW_STATS
    assert stats["dp_accepted"].dtype == bool
    epsilon = stats["dp_epsilon"].values  # a function of the iteration alone
    np.testing.assert_array_equal(epsilon[0], epsilon[1])


def test_logs_warnings_and_output_hold_no_secret(session, capfd):
    assert SECRETS.in_text(*session["messages"]) == []
    model = planted_model()
    with model:
        dp.sample(
            3,
            chains=1,
            cores=1,
            step="DPLangevin",
            step_kwargs=SETTINGS["DPLangevin"],
            progressbar=True,
            random_seed=2,
        )
    said = capfd.readouterr()
    assert "rate" not in said.out  # the progress bar shows variables of the sampler at most
    assert SECRETS.in_text(said.out, said.err) == []


def test_the_ledger_file_holds_no_secret(session):
    directory = session["ledger"].parent
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert session["ledger"] in files
    for path in files:
        assert SECRETS.in_bytes(path.read_bytes()) == []
    table = dp.get_budget(session["model"]).table().to_string()
    assert SECRETS.in_text(table, repr(dp.get_budget(session["model"]))) == []


def test_the_statement_survives_a_netcdf_file_that_holds_no_secret(session, tmp_path):
    safe, path = session["safe"], tmp_path / "posterior.nc"
    safe.to_netcdf(path)
    assert SECRETS.in_bytes(path.read_bytes()) == []
    if _compat.PYMC_MAJOR < 6:
        import arviz as az

        back = az.from_netcdf(str(path))
    else:
        back = xr.open_datatree(path)
    assert dp.privacy_statement(back) == dp.privacy_statement(safe)
    assert json.loads(back.attrs["pymc_dp_statement"])["dataset"] == "wave 3"
    again = dp.release(back, session["model"])
    for name in ("a", "b", "odds"):
        np.testing.assert_array_equal(
            _compat.group(again, "posterior")[name], _compat.group(safe, "posterior")[name]
        )


def test_statement_says_what_was_declared(session):
    facts = json.loads(session["safe"].attrs["pymc_dp_statement"])
    assert facts["privacy_guarantee"] == "(epsilon, delta)-differential privacy"
    assert facts["n_units"] == len(np.unique(SECRETS.ids))
    assert facts["ledger"] == "persistent"
    assert "scaling" not in facts["settings"]
    text = dp.privacy_statement(session["safe"])
    assert "(5, 1e-06)-differentially private" in text


# -- what is refused ------------------------------------------------------------------------------


def test_release_refuses_what_did_not_come_from_a_private_step(session):
    model, raw = session["model"], session["raw"]
    no_plan = _compat.inference_data({"posterior": _compat.group(raw, "posterior")}, {})
    with pytest.raises(UnsafeRelease, match="no dp_plan_id"):
        dp.release(no_plan, model)
    with pytest.raises(UnsafeRelease, match="another budget"):
        dp.release(raw, logistic_model())
    with pytest.raises(UnsafeRelease, match="no PrivacyBudget"):
        dp.release(raw, pm.Model())
    stats = _compat.group(raw, "sample_stats").copy(deep=True)
    stats["dp_plan_id"][0] = 5
    mixed = {"posterior": _compat.group(raw, "posterior"), "sample_stats": stats}
    with pytest.raises(UnsafeRelease, match="several plans"):
        dp.release(_compat.inference_data(mixed, {}), model)


@pytest.mark.parametrize("name", ["rate", "first", "y", "w", "observed"])
def test_what_touches_private_data_is_refused_by_name(session, name):
    with pytest.raises(UnsafeRelease, match=name):
        dp.release(session["raw"], session["model"], var_names=["a", name])
    model = planted_model()
    with pytest.raises(UnsafeRelease, match=name):
        dp.sample(5, chains=1, model=model, var_names=["a", name])
    assert dp.get_budget(model).spent().epsilon == 0


def test_a_deterministic_that_hides_data_in_an_inner_graph_is_refused():
    from pytensor.compile.builders import OpFromGraph

    model = planted_model(people=False)
    with model:
        inner = pt.dscalar()
        hidden = OpFromGraph([inner], [inner + pt.as_tensor_variable(SECRETS.x[:2, 0])])
        pm.Deterministic("hidden", hidden(model["a"]))
        pm.Deterministic("size", model["a"] * N)
    budget = dp.get_budget(model)
    assert "hidden" not in releasable(model, budget)
    with pytest.raises(UnsafeRelease, match="hidden"):
        releasable(model, budget, ["hidden"])
    assert releasable(model, budget, ["size"])  # n is public where records are replaced


@pytest.mark.slow
def test_a_private_number_of_records_is_not_published():
    model = planted_model(people=False, neighboring="add_or_remove_one", n_public=30)
    with model:
        pm.Deterministic("size", model["a"] * N)
        pm.Deterministic("twice", model["a"] * 2)
    budget = dp.get_budget(model)
    assert not {"size", "twice"} & {*releasable(model, budget)}
    names = releasable(model, budget, ["a", "b", "odds", "twice"])
    safe = dp.release(sample(model, make_step(model), var_names=names), model)
    text = dp.privacy_statement(safe) + safe.attrs["pymc_dp_statement"]
    assert not re.search(rf"\b{N}\b", text)


def test_predictions_do_not_bring_names_back(session):
    with pytest.raises(UnsafeRelease, match="private covariates"):
        dp.sample_posterior_predictive(session["safe"], session["model"])
    data = [v.name for v in session["model"].data_vars]
    with pytest.raises(
        ValueError, match=r"not in the model, or are data or parameters; it observes"
    ):
        dp.sample_posterior_predictive(session["safe"], session["model"], var_names=data[:1])

    def fit(**budget):
        with pm.Model(coords={"site": SECRETS.names[:5]}) as model:
            a = pm.Normal("a", 0, 1)
            pm.Bernoulli("pilot", logit_p=a, observed=np.ones(5, int), dims="site")
            pm.Bernoulli("y", logit_p=a, observed=SECRETS.y % 2)
            dp.PrivacyBudget(5.0, DELTA, public=["pilot"], **budget)
        return dp.release(sample(model, make_step(model)), model), model

    safe, model = fit()
    predictive = dp.sample_posterior_predictive(
        safe, model, var_names=["pilot"], random_seed=1, progressbar=False
    )
    draws = _compat.group(predictive, "posterior_predictive")
    np.testing.assert_array_equal(draws.coords["site"], np.arange(5))
    assert SECRETS.in_result(predictive) == []
    safe, model = fit(neighboring="add_or_remove_one", n_public=30)
    with pytest.raises(UnsafeRelease, match="`y`"):  # would have as many entries as there are rows
        dp.sample_posterior_predictive(safe, model)


@pytest.mark.slow
def test_insecure_noise_is_stamped_and_refused_with_a_persistent_ledger(tmp_path):
    model = logistic_model()
    with insecure_noise(1):
        step = make_step(model)
        idata = sample(model, step)
    safe = dp.release(idata, model)  # the stamp does not depend on where release is called
    assert json.loads(safe.attrs["pymc_dp_statement"])["privacy_guarantee"] == "none"
    assert dp.privacy_statement(safe).startswith("NO PRIVACY GUARANTEE")

    dp.Ledger.create(tmp_path / "ledger.sqlite")
    model = logistic_model(ledger=tmp_path / "ledger.sqlite")
    with insecure_noise(1), pytest.raises(PrivacyError, match="persistent ledger"):
        make_step(model)
    model = logistic_model()
    step = make_step(model)
    with insecure_noise(1), pytest.raises(PrivacyError, match="after the step was built"):
        sample(model, step)
    assert dp.get_budget(model).spent().epsilon == 0


# -- error texts ----------------------------------------------------------------------------------


def faults(session):
    """Ways to go wrong with secret data at hand, and what is to be raised."""
    s = SECRETS
    model, step, raw = session["model"], session["step"], session["raw"]

    def build(body, **budget):
        with pm.Model(coords={"person": s.names}):
            a, b = pm.Normal("a"), pm.Normal("b", shape=2)
            body(a, b)
            own = dp.PrivacyBudget(**{"epsilon": 5.0, "delta": DELTA} | budget)
            return make_step(pm.modelcontext(None)), own

    def poisson(rate, y=s.y):
        pm.Poisson("y", mu=pm.math.exp(rate), observed=y, dims="person")

    holes = np.where(s.x > 0.9, np.nan, s.x)
    holes[3, 1] = np.inf
    labels = (s.y % 3).astype(int)
    labels[5] = 7_654_321
    missing = np.where(s.y > np.median(s.y), np.nan, s.y).astype(float)
    words = np.array(s.names)
    yield lambda: build(lambda a, b: poisson(holes @ b))
    yield lambda: build(lambda a, b: poisson(pm.Data("w", holes) @ b))
    yield lambda: build(lambda a, b: poisson(pm.Normal("g", shape=3)[labels]))
    yield lambda: build(lambda a, b: poisson((s.x - pt.mean(s.x, axis=0)) @ b))
    yield lambda: build(lambda a, b: poisson(a * pm.Data("w", s.w) / pt.max(pm.Data("v", s.w))))
    yield lambda: build(lambda a, b: pm.AR("y", [a], sigma=1, observed=s.w))
    yield lambda: build(lambda a, b: (poisson(a), pm.Potential("p", -pt.sum((a - s.w) ** 2))))
    yield lambda: build(lambda a, b: pm.Normal("y", a, 1, observed=missing))
    yield lambda: build(lambda a, b: pm.Normal("y", a, 1, observed=words))
    yield lambda: build(lambda a, b: pm.Normal("y", pm.Normal("c", s.w, 1), 1, observed=s.w))
    yield lambda: build(
        lambda a, b: pm.Normal("y", pm.Normal("c", s.w.mean() * s.w), 1, observed=s.w)
    )
    yield lambda: build(lambda a, b: (poisson(a), pm.Normal("z", a, 1, observed=s.w[:9])))
    yield lambda: build(lambda a, b: poisson(pm.Data("v", s.x[0]) @ b))
    yield lambda: build(lambda a, b: poisson(a), privacy_unit=s.ids[:-1])
    yield lambda: build(lambda a, b: poisson(a), privacy_unit=s.w)
    yield lambda: build(lambda a, b: poisson(a), privacy_unit={"z": s.ids})
    yield lambda: build(lambda a, b: poisson(a), delta=0.2)
    yield lambda: build(lambda a, b: poisson(a), neighboring="add_or_remove_one")
    yield lambda: build(lambda a, b: poisson(a), public=["nobody"])
    yield lambda: build(lambda a, b: poisson(a), dataset=s.w)
    yield lambda: dp.PrivacyBudget(1.0, DELTA, model=model)
    yield lambda: dp.PrivacyBudget(1.0, DELTA, model=model.copy())
    yield lambda: make_step(model.copy())
    yield lambda: make_step(model, scaling=s.w)
    yield lambda: make_step(model, scaling={"a": s.w, "b": 1.0})
    yield lambda: make_step(model, clip_norm={"wrong": 1.0})
    yield lambda: make_step(model, vars=[model["a"]])
    yield lambda: sample(model, step)  # its two runs are used
    yield lambda: pm.sample(9, tune=0, chains=2, cores=1, step=step, model=model)
    yield lambda: pm.sample(3, tune=0, chains=1, model=model, progressbar=False)
    yield lambda: dp.release(raw, model, var_names=["rate"])
    yield lambda: dp.sample(3, step=step, model=model, trace="anything")
    yield lambda: dp.sample(3, step=step, model=model, idata_kwargs={"log_likelihood": True})
    yield lambda: dp.sample_posterior_predictive(raw, model)
    yield lambda: dp.sample_posterior_predictive(session["safe"], model, var_names=["y"])


def texts_of(error):
    while error is not None:
        yield str(error)
        yield repr(error.args)
        error = error.__cause__ or error.__context__


@pytest.mark.slow
def test_error_texts_hold_no_secret(session):
    ours = 0
    for number, fault in enumerate(faults(session)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                fault()
            except Exception as error:
                found = error
            else:
                pytest.fail(f"fault {number} was accepted")
        ours += isinstance(found, PrivacyError)
        said = [*texts_of(found), *(str(warning.message) for warning in caught)]
        assert SECRETS.in_text(*said) == [], (number, said[0])
        assert "7654321" not in "".join(said), number
        assert "Zyxwv" not in "".join(said), number
    assert ours >= 20


# -- the compile cache ----------------------------------------------------------------------------

CACHED_RUN = """
    import warnings
    warnings.filterwarnings("ignore")
    import numpy as np, pymc as pm, pytensor, pytensor.tensor as pt
    import pymc_dp as dp
    from tests.privacy import test_leaks as leaks
    from tests.privacy.toy import SETTINGS

    v = pt.dvector()
    pytensor.function([v], v * leaks.CONTROL, mode="NUMBA")(np.ones(2))
    model = leaks.planted_model()
    dp.sample(
        2, chains=1, cores=1, step="DPHMC", step_kwargs=SETTINGS["DPHMC"], model=model,
        progressbar=False, compute_convergence_checks=False,
    )
    print("sampled")
"""
CONTROL = 0.8431973261194375


@pytest.mark.slow
def test_the_compile_cache_holds_no_secret(tmp_path):
    """A fresh cache, filled by one run in a process of its own."""
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTENSOR_FLAGS": f"cxx=,base_compiledir={tmp_path}/pytensor",
        "NUMBA_CACHE_DIR": f"{tmp_path}/numba",
        "PYTHONPATH": os.pathsep.join([str(root), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CACHED_RUN)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert "sampled" in done.stdout, done.stderr[-3000:]
    assert SECRETS.in_text(done.stdout, done.stderr) == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 50
    data = {path: path.read_bytes() for path in files}
    control = [repr(CONTROL)[:12].encode(), np.float64(CONTROL).tobytes()]
    assert any(pattern in content for content in data.values() for pattern in control)
    leaking = {path.name: SECRETS.in_bytes(content) for path, content in data.items()}
    assert {name: found for name, found in leaking.items() if found} == {}
