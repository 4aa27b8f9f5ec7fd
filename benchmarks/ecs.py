"""Samples of records against all of them: the tables and figures of Dang et al. (2019).

::

    python -m benchmarks.ecs --quick
    python -m benchmarks.ecs --n 100000 1000000 --json ecs.json --figure docs/figures/ecs.png
    python -m benchmarks.ecs --methods hmc perturbed generic numpyro_ecs nuts nutpie

Seconds are of processor time, in all threads, so that other work on the machine counts little.
The HIGGS data are simulated (d = 29), and so are the firms of the additive spline model (d = 81).
Methods that need a package that is not installed are left out.
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
from scipy.stats import gaussian_kde

import pymc_dp as dp
from benchmarks.machine import description
from benchmarks.runs import quiet
from pymc_dp.base.compat import effective_draws
from pymc_dp.subsampling.linear import linear_rows
from pymc_dp.subsampling.preparation import Posterior
from pymc_dp.subsampling.reading import PriorTerm, read

#: Paper, Tables 2 and 4: perturbed and signed.
PAPER = {
    "higgs": {"accept": (0.98, 0.979), "accept_u": (1.0, 0.993), "IF": (2.185, 2.192)},
    "splines": {"accept": (0.967, 0.962), "accept_u": (0.994, 0.964), "IF": (2.202, 2.31)},
}
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
    IF_each: tuple[float, ...] = ()

    @property
    def computational_time(self) -> float:
        """CT of eq. 3.2, and of eq. 5.4 with signs."""
        return self.IF * self._cost

    @property
    def computational_times(self) -> np.ndarray:
        """The same for each parameter."""
        return np.array(self.IF_each) * self._cost

    @property
    def _cost(self) -> float:
        return self.evaluations / (2 * self.tau - 1) ** 2


Run = tuple[Result, np.ndarray]


def summarised(result: Result, draws: np.ndarray, seconds: float) -> Run:
    ess = effective_draws(draws[None])
    result.ms_per_draw = 1e3 * seconds / len(draws)
    result.ess_per_s = float(ess.min()) / seconds
    squares = (draws - draws.mean(axis=0)) ** 2
    result.ess_squares_per_s = float(effective_draws(squares[None]).min()) / seconds
    result.IF_each = tuple(map(float, len(draws) / ess))
    result.IF = float(np.mean(result.IF_each))
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
    if isinstance(step, dp.HMCECS):
        for key, stat in (("accept", "acceptance_rate"), ("accept_u", "acceptance_rate_u")):
            setattr(result, key, float(np.mean([s[stat] for s in stats])))
        result.sigma2 = float(np.mean([s["sigma2"] for s in stats]))
        result.tau = float(np.mean([s["sign"] > 0 for s in stats]))
    result.evaluations = m * (step.n_steps + 1.0)
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


def against_perturbed(runs: list[Run]) -> dict[str, list[float]]:
    """Least, median and largest CT of a parameter, relative to perturbed (Tables 1 and 3)."""
    base = {(r.problem, r.n): r for r, _ in runs if r.method == "perturbed"}
    found = {}
    for r, _ in runs:
        own = base.get((r.problem, r.n))
        if own is not None and r is not own and math.isfinite(r.evaluations):
            ratios = r.computational_times / own.computational_times
            key = f"{r.problem} {r.n} {r.method}"
            found[key] = [float(f(ratios)) for f in (np.min, np.median, np.max)]
    return found


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


# -- figure ---------------------------------------------------------------------------------------


def scaling(dimensions: list[int]) -> dict[int, list[float]]:
    """Step sizes by dual averaging, in a normal regression with n = 10 000 (Section 6.7)."""
    found: dict[int, list[float]] = {1: [], 2: []}
    for d in dimensions:
        rng = np.random.default_rng(d)
        x = rng.standard_normal((10_000, d))
        with pm.Model() as model:
            beta = pm.Normal("beta", 0, 5, shape=d)
            pm.Normal("y", x @ beta, 1.0, observed=x @ rng.normal(size=d) + rng.normal(size=10_000))
        for order, sizes in found.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step = dp.HMCECS(order=order, model=model, progressbar=False)
            step.set_rng(np.random.default_rng(0))
            for _ in range(400):
                step.step(model.initial_point())
            sizes.append(step._averaging.current(tune=False))
    return found


def variances(n: int) -> dict[int, float]:
    """Pilot variance of the estimate from 1300 records, by order of the control variates."""
    model, found = build(*higgs(n)), {}
    for order in (0, 1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = dp.HMCECS(order=order, subsample_size=1300, model=model, progressbar=False)
        found[order] = step.sigma2
    return found


def figure(runs: list[Run], path: Path, n: int) -> None:
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, 3, figsize=(11.0, 3.2), layout="constrained")
    [problem] = {run[0].problem for run in runs[:1]}
    for result, draws in runs:
        if result.problem == problem and result.n == runs[0][0].n:
            x = draws[:, 3]
            grid = np.linspace(x.min(), x.max(), 200)
            axes[0].plot(grid, gaussian_kde(x)(grid), label=result.method, lw=1)
    axes[0].set(title="A marginal posterior", xlabel="beta[3]")
    axes[0].legend(fontsize=6)
    dimensions = [2, 4, 8, 16, 32, 64]
    for order, sizes in scaling(dimensions).items():
        axes[1].loglog(dimensions, sizes, "o-", label=f"order {order}")
    guide = np.array(dimensions, dtype=float)
    axes[1].loglog(guide, 1.8 * (guide / 2) ** -0.25, "k:", label="d^(-1/4)")
    axes[1].set(title="Step size for acceptance 0.8", xlabel="d")
    axes[1].set_xticks(dimensions, map(str, dimensions))
    axes[1].minorticks_off()
    axes[1].legend(fontsize=7)
    found = variances(n)
    axes[2].semilogy(list(found), list(found.values()), "o-")
    axes[2].axhline(1.0, color="k", ls=":")
    axes[2].set(
        title="Variance, 1300 records", xlabel="order of control variates", xticks=[0, 1, 2]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="HIGGS-like, n = 20 000, few draws")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=["higgs"])
    parser.add_argument("--n", nargs="+", type=int, default=[100_000])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS)[:9])
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
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
        print(f"{problem:8s} {'paper':>8s} {PAPER[problem]}")
    relative = against_perturbed(runs)
    for key, (least, median, most) in relative.items():
        print(f"{key}: CT against perturbed {least:.2f} {median:.2f} {most:.2f}")
    ratios = against_peers(runs)
    print_ratios(ratios)
    if args.json:
        report = {
            "machine": description(),
            "runs": [asdict(result) for result, _ in runs],
            "against_perturbed": relative,
            "ratios": ratios,
            "paper": PAPER,
        }
        args.json.write_text(json.dumps(report, indent=1))
    if args.figure:
        figure(runs, args.figure, sizes[0])


if __name__ == "__main__":
    main()
