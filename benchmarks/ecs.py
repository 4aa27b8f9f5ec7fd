"""Samplers that read samples of the records against those that read all, in several packages.

::

    python -m benchmarks.ecs --quick
    python -m benchmarks.ecs --n 100000 1000000 --json ecs.json
    python -m benchmarks.ecs --methods hmc perturbed generic numpyro_ecs nuts nutpie

Seconds are of processor time, in all threads, so that other work on the machine counts little.
The HIGGS data are simulated (d = 29), and so are the firms of the additive spline model (d = 81).
Methods that need a package that is not installed are left out.  The tables and figures of Dang et
al. (2019) are in `replications.hmc_ecs_2019`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
from scipy.special import expit

import pymc_dp as dp
from benchmarks.machine import description
from benchmarks.runs import quiet
from pymc_dp.base.compat import effective_draws
from pymc_dp.subsampling.linear import linear_rows
from pymc_dp.subsampling.preparation import Posterior
from pymc_dp.subsampling.reading import PriorTerm, read

PRIOR_SD = 10.0
#: Iterations in which NUTS adapts.
_TUNE = 200


def higgs(n: int) -> tuple[np.ndarray, np.ndarray]:
    """28 features and an intercept."""
    rng = np.random.default_rng(1)
    x = np.column_stack([np.ones(n), rng.standard_normal((n, 28))])
    theta = rng.normal(0.0, 0.3, 29)
    return x, rng.binomial(1, expit(x @ theta))


def splines(n: int) -> tuple[np.ndarray, np.ndarray]:
    """An intercept and 10 hat functions of each of 8 covariates; few outcomes are 1."""
    rng = np.random.default_rng(2)
    knots, columns = np.linspace(-2.0, 2.0, 11), [np.ones((n, 1))]
    for _ in range(8):
        z = np.clip(rng.standard_normal(n), -2.0, 2.0)
        hats = np.maximum(0.0, 1.0 - np.abs(z[:, None] - knots) / (knots[1] - knots[0]))
        columns.append(np.delete(hats, 5, axis=1))
    x = np.hstack(columns)
    theta = np.concatenate([[-3.0], rng.normal(0.0, 0.4, 80)])
    return x, rng.binomial(1, expit(x @ theta))


PROBLEMS = {"higgs": higgs, "splines": splines}


def build(x: np.ndarray, y: np.ndarray, *, plain: bool = True) -> pm.Model:
    """The regression; if it is not `plain`, written so that the general path takes it."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, PRIOR_SD, shape=x.shape[1])
        if plain:
            pm.Bernoulli("y", logit_p=x @ beta, observed=y)
        else:
            pm.Bernoulli("y", p=0.5 + 0.5 * pm.math.tanh(0.5 * (x @ beta)), observed=y)
    return model


@dataclass
class Result:
    """One run.

    Effective draws are those of the worst parameter: for its mean, and for its square about the
    mean.  NUTS overshoots, so that its means are better than those of independent draws and its
    squares worse.  `evaluations` are densities and gradients of one record, for each draw.
    """

    problem: str
    n: int
    method: str
    setup_s: float
    ms_per_draw: float
    ess_per_s: float
    ess_squares_per_s: float
    IF: float
    accept: float = math.nan
    accept_u: float = math.nan
    tau: float = 1.0
    share: float = 1.0
    sigma2: float = math.nan
    evaluations: float = math.nan
    error_mean: float = math.nan
    error_sd: float = math.nan

    @property
    def computational_time(self) -> float:
        """CT of eq. 3.2, and of eq. 5.4 with signs."""
        return self.IF * self.evaluations / (2 * self.tau - 1) ** 2


Run = tuple[Result, np.ndarray]


def summarised(result: Result, draws: np.ndarray, seconds: float) -> Run:
    ess = effective_draws(draws[None])
    result.ms_per_draw = 1e3 * seconds / len(draws)
    result.ess_per_s = float(ess.min()) / seconds
    squares = (draws - draws.mean(axis=0)) ** 2
    result.ess_squares_per_s = float(effective_draws(squares[None]).min()) / seconds
    result.IF = float(np.mean(len(draws) / ess))
    return result, draws


def ours(problem: str, model: pm.Model, name: str, draws: int, **settings: Any) -> Run:
    """One of the steps of the package, without PyMC around it."""
    sampler = settings.pop("sampler", dp.HMCECS)
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = sampler(model=model, progressbar=False, **settings)
    setup = time.process_time() - begin
    step.set_rng(np.random.default_rng(5))
    point = model.initial_point()
    for _ in range(300):
        point, _ = step.step(point)
    step.stop_tuning()
    found, stats = [], []
    begin = time.process_time()
    for _ in range(draws):
        point, [stat] = step.step(point)
        found.append(point["beta"])
        stats.append(stat)
    seconds = time.process_time() - begin
    n, m = step.variates.n, step.subsample_size
    result = Result(problem, n, name, setup, 0.0, 0.0, 0.0, 0.0, share=m / n)
    conserving = isinstance(step, dp.HMCECS)
    if conserving:
        for key, stat in (("accept", "acceptance_rate"), ("accept_u", "acceptance_rate_u")):
            setattr(result, key, float(np.mean([s[stat] for s in stats])))
        result.sigma2 = float(np.mean([s["sigma2"] for s in stats]))
        result.tau = float(np.mean([s["sign"] > 0 for s in stats]))
    result.evaluations = float(m * (step.n_steps + conserving))  # one density more than gradients
    return summarised(result, np.array(found), seconds)


def full_hmc(problem: str, model: pm.Model, name: str, draws: int) -> Run:
    """The same trajectories on all records: h = 0.2, L = 6, mass from the curvature at the mode."""
    begin = time.process_time()
    records = read(model, "HMC")
    [group] = records.groups
    source = linear_rows(group.graph, records.parameters, group.store.read())
    assert source is not None
    target = Posterior(source, PriorTerm(records))
    curved = dp.HMCECS(model=model, progressbar=False).variates.curved
    setup = time.process_time() - begin
    rng, theta = np.random.default_rng(6), curved.theta.copy()
    value, gradient = target.total(theta)
    found, accepted = [], []
    begin = time.process_time()
    for _ in range(draws):
        z = rng.standard_normal(len(theta))
        energy, p, moved = value - 0.5 * z @ z, curved.inverse_root.T @ z, theta
        slope, end = gradient, value
        for _ in range(6):
            p = p + 0.1 * slope
            moved = moved + 0.2 * (curved.covariance @ p)
            end, slope = target.total(moved)
            p = p + 0.1 * slope
        accept = math.exp(min(0.0, end - 0.5 * p @ curved.covariance @ p - energy))
        if rng.random() < accept:
            theta, value, gradient = moved, end, slope
        found.append(theta)
        accepted.append(accept)
    seconds = time.process_time() - begin
    result = Result(problem, source.n, name, setup, 0.0, 0.0, 0.0, 0.0, float(np.mean(accepted)))
    result.evaluations = 6.0 * source.n
    return summarised(result, np.array(found), seconds)


def numpyro_chain(
    problem: str, model: pm.Model, name: str, draws: int, kind: str, m: int | None = None
) -> Run:
    """NumPyro's HMC, NUTS, or HMCECS with second-order Taylor proxies about the same mode.

    All have the covariance at the mode as inverse mass matrix and begin there; NUTS adapts its step
    size in 50 iterations.
    """
    import jax
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import HMC, HMCECS, MCMC, NUTS

    jax.config.update("jax_enable_x64", True)
    x, y = map(jax.numpy.asarray, PROBLEMS[problem](int(model["y"].shape[0].eval())))
    curved = dp.HMCECS(model=model, progressbar=False).variates.curved

    def declared(x: Any, y: Any) -> None:
        beta = numpyro.sample("beta", dist.Normal(0, PRIOR_SD).expand([x.shape[1]]).to_event(1))
        if m is None:
            numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)
            return
        with numpyro.plate("records", len(x), subsample_size=m):
            rows, outcomes = numpyro.subsample(x, 1), numpyro.subsample(y, 0)
            numpyro.sample("y", dist.Bernoulli(logits=rows @ beta), obs=outcomes)

    begin = time.process_time()
    mass = {"inverse_mass_matrix": curved.covariance, "adapt_mass_matrix": False}
    if kind == "nuts":
        kernel = NUTS(declared, step_size=0.5, dense_mass=True, **mass)
    else:
        kernel = HMC(
            declared,
            step_size=0.2,
            num_steps=6,
            trajectory_length=None,  # or it would take the place of the step size
            adapt_step_size=False,
            dense_mass=True,
            **mass,
        )
    if m is not None:
        proxy = HMCECS.taylor_proxy({"beta": curved.theta}, degree=2)
        kernel = HMCECS(kernel, num_blocks=100, proxy=proxy)
    chain = MCMC(
        kernel, num_warmup=50 if kind == "nuts" else 10, num_samples=draws, progress_bar=False
    )
    start = {"beta": curved.theta}
    chain.warmup(jax.random.PRNGKey(0), x, y, init_params=start, collect_warmup=False)
    chain.run(jax.random.PRNGKey(1), x, y)  # compiles
    setup = time.process_time() - begin
    begin = time.process_time()
    chain.run(jax.random.PRNGKey(2), x, y)
    found = np.asarray(chain.get_samples()["beta"])
    seconds = time.process_time() - begin
    result = Result(problem, len(x), name, setup, 0.0, 0.0, 0.0, 0.0, share=(m or len(x)) / len(x))
    if kind == "hmc":
        result.evaluations = (6.0 if m is None else 7.0) * (m or len(x))
    return summarised(result, found, seconds)


def nuts(problem: str, model: pm.Model, name: str, draws: int) -> Run:
    """PyMC's NUTS on all records: the time of the draws that are kept."""
    begin = time.process_time()
    with model:
        step = pm.NUTS(compile_kwargs={"mode": "NUMBA"})
        idata = pm.sample(
            draws,
            tune=_TUNE,
            chains=1,
            cores=1,
            step=step,
            progressbar=False,
            compute_convergence_checks=False,
            random_seed=7,
        )
    seconds = float(idata.sample_stats["process_time_diff"].sum())
    setup = time.process_time() - begin - seconds
    n = int(model["y"].shape[0].eval())
    found = idata.posterior["beta"].values[0]
    return summarised(Result(problem, n, name, setup, 0.0, 0.0, 0.0, 0.0), found, seconds)


def nutpie_nuts(problem: str, model: pm.Model, name: str, draws: int) -> Run:
    """nutpie's NUTS on all records, compiled beforehand."""
    import nutpie

    begin = time.process_time()
    compiled = nutpie.compile_pymc_model(model)
    setup, begin = time.process_time() - begin, time.process_time()
    idata = nutpie.sample(
        compiled,
        draws=draws,
        tune=_TUNE,
        chains=1,
        cores=1,
        seed=7,
        progress_bar=False,
        save_warmup=True,
    )
    seconds = time.process_time() - begin
    steps = float(idata.sample_stats["n_steps"].sum())
    # the warm-up's share of the gradients is its share of the time
    seconds *= steps / (steps + float(idata.warmup_sample_stats["n_steps"].sum()))
    n = int(model["y"].shape[0].eval())
    found = idata.posterior["beta"].values[0]
    return summarised(Result(problem, n, name, setup, 0.0, 0.0, 0.0, 0.0), found, seconds)


SETTINGS = {"step_size": 0.2, "path_length": 1.2}
Method = Callable[[str, pm.Model, str, int], Run]


def _ours(**settings: Any) -> Method:
    return lambda problem, model, name, draws: ours(problem, model, name, draws, **settings)


METHODS: dict[str, Method] = {
    "hmc": full_hmc,
    "perturbed": _ours(subsample_size=1300, **SETTINGS),
    "perturbed100": _ours(subsample_size=100, **SETTINGS),
    "perturbed_auto": _ours(),
    "signed": _ours(estimator="signed", subsample_size=3000, **SETTINGS),
    "signed_auto": _ours(estimator="signed"),
    "sgld": _ours(sampler=dp.SGLD, subsample_size=1300, n_steps=6),
    "sghmc": _ours(sampler=dp.SGHMC, subsample_size=1300, step_size=0.2, n_steps=6),
    "sgnht": _ours(sampler=dp.SGNHT, subsample_size=1300, step_size=0.2, n_steps=6),
    "generic": lambda problem, model, *rest: ours(
        problem,
        build(*PROBLEMS[problem](int(model["y"].shape[0].eval())), plain=False),
        *rest,
        subsample_size=1300,
        **SETTINGS,
    ),
    "numpyro_hmc": lambda *a: numpyro_chain(*a, kind="hmc"),
    "numpyro_nuts": lambda *a: numpyro_chain(*a, kind="nuts"),
    "numpyro_ecs": lambda *a: numpyro_chain(*a, kind="hmc", m=1300),
    "numpyro_ecs100": lambda *a: numpyro_chain(*a, kind="hmc", m=100),
    "nuts": nuts,
    "nutpie": nutpie_nuts,
}
#: Samplers that read all records in every step.
FULL = ("hmc", "numpyro_hmc", "numpyro_nuts", "nuts", "nutpie")
QUICK = ("hmc", "perturbed", "perturbed_auto", "signed", "sghmc")


def compared(result: Result, draws: np.ndarray, reference: np.ndarray) -> None:
    """Errors of means and sds over their expected Monte Carlo errors, root mean squares."""
    ess, exact = effective_draws(draws[None]), effective_draws(reference[None])
    sd = reference.std(axis=0)
    noise = np.sqrt(1 / ess + 1 / exact)
    away = (draws.mean(axis=0) - reference.mean(axis=0)) / sd / noise
    spread = np.log(draws.std(axis=0) / sd) / (noise / math.sqrt(2))
    result.error_mean = float(np.sqrt(np.mean(away**2)))
    result.error_sd = float(np.sqrt(np.mean(spread**2)))


def measure(problem: str, n: int, methods: list[str], draws: int) -> list[Run]:
    model = build(*PROBLEMS[problem](n))
    runs: list[Run] = []
    for name in methods:
        # 500 at n = 100,000
        length = min(draws, max(50, 50_000_000 // n)) if name in FULL else draws
        try:
            runs.append(METHODS[name](problem, model, name, length))
        except (ImportError, ModuleNotFoundError) as error:
            print(f"{problem:8s} {n:8d} {name:15s} left out: {error}")
            continue
        if runs[0][0].method == "hmc":
            compared(*runs[-1], runs[0][1])
        print(_row(runs[-1][0], runs[0][0]), flush=True)
    return runs


HEADER = (
    f"{'problem':8s} {'n':>8s} {'method':15s} {'set-up s':>8s} {'ms/draw':>8s} {'ESS/s':>7s} "
    f"{'squares':>7s} {'IF':>5s} {'acc':>5s} {'acc u':>6s} {'tau':>5s} "
    f"{'data %':>7s} {'sigma2':>8s} {'RCT':>7s} {'mean':>5s} {'sd':>5s}"
)


def _row(r: Result, first: Result) -> str:
    """RCT: computational time of the first method, full HMC, over that of this one (eq. 6.1)."""
    return (
        f"{r.problem:8s} {r.n:8d} {r.method:15s} {r.setup_s:8.1f} {r.ms_per_draw:8.3f} "
        f"{r.ess_per_s:7.0f} "
        f"{r.ess_squares_per_s:7.0f} {r.IF:5.2f} {r.accept:5.3f} {r.accept_u:6.4f} {r.tau:5.3f} "
        f"{100 * r.share:7.3f} {r.sigma2:8.2g} "
        f"{first.computational_time / r.computational_time:7.1f} "
        f"{r.error_mean:5.2f} {r.error_sd:5.2f}"
    )


def against_peers(runs: list[Run]) -> dict[str, dict[str, dict[str, float]]]:
    """How many times faster each run is than each sampler of another package."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    peers = [r for r, _ in runs if r.method.startswith(("numpyro", "nut"))]
    for r, _ in runs:
        if r in peers:
            continue
        key = f"{r.problem} {r.n} {r.method}"
        found[key] = {
            p.method: {
                "ms_per_draw": p.ms_per_draw / r.ms_per_draw,
                "ess_per_s": r.ess_per_s / p.ess_per_s,
                "ess_squares_per_s": r.ess_squares_per_s / p.ess_squares_per_s,
            }
            for p in peers
            if (p.problem, p.n) == (r.problem, r.n)
        }
    return found


def print_ratios(ratios: dict[str, dict[str, dict[str, float]]]) -> None:
    """One line per run: ms/draw and ESS/s (means, squares) relative to each peer."""
    for key, peers in ratios.items():
        parts = [f"{p} " + " ".join(f"{x:.1f}x" for x in v.values()) for p, v in peers.items()]
        if parts:
            print(f"{key}: ms/draw, ESS/s, of squares, against " + ", ".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="HIGGS-like, n = 20 000, few draws")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=["higgs"])
    parser.add_argument("--n", nargs="+", type=int, default=[100_000])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS)[:9])
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    quiet()
    sizes = [20_000] if args.quick else args.n
    methods = list(QUICK) if args.quick else args.methods
    print(description())
    print(HEADER)
    runs: list[Run] = []
    for problem in args.problems:
        for n in sizes:
            runs += measure(problem, n, methods, 500 if args.quick else args.draws)
    ratios = against_peers(runs)
    print_ratios(ratios)
    if args.json:
        report = {
            "machine": description(),
            "runs": [asdict(result) for result, _ in runs],
            "ratios": ratios,
        }
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
