"""What peers do, each in an interpreter that has it; :mod:`benchmarks.peers` calls this file::

    python peer_scripts.py NAME IN.npz OUT.npz
    python peer_scripts.py versions

Imports nothing of this repository.  Exit status 3: a package is missing here.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any

import numpy as np

PACKAGES = (
    "numpyro jax d3p fourier-accountant blackjax nutpie pymc diffprivlib scikit-learn opendp xai"
).split()
MISSING = 3
#: What the public search of variational inference tries; it costs no budget, in favour of the peer.
CLIP_NORMS, RATES = (1.0, 10.0, 100.0), (0.03, 0.1)
DRAWS = 1000

Arrays = dict[str, Any]


@contextmanager
def _seconds(into: list[float]) -> Iterator[None]:
    """Adds the processor time of the block to a list."""
    begin = time.process_time()
    yield
    into.append(time.process_time() - begin)


# -- private posteriors ---------------------------------------------------------------------------


def _declare(kind: str) -> Callable[..., None]:
    """The NumPyro model of a task, for batches of rows."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    def model(x: Any, y: Any, n: int) -> None:
        sample, d = numpyro.sample, x.shape[1]
        if kind == "linear":
            s2 = sample("b_s2", dist.InverseGamma(20.0, 0.5))
            w = sample("a_w", dist.Normal(0.0, 2.0 * jnp.sqrt(s2)).expand([d]).to_event(1))
            law = dist.Normal(x @ w, jnp.sqrt(s2))
        elif kind == "bernoulli":
            law = dist.Bernoulli(sample("p", dist.Beta(10.0, 10.0)))
        elif kind == "exponential":
            law = dist.Exponential(sample("rate", dist.Gamma(8.0, 2.0)))
        else:
            beta = sample("beta", dist.Normal(0.0, 1.0).expand([d]).to_event(1))
            law = dist.Bernoulli(logits=x @ beta)
        with numpyro.plate("records", n, subsample_size=len(x)):
            sample("y", law, obs=y)

    return model


def dpvi(given: Arrays) -> Arrays:
    """d3p: DP-SGD on the ELBO, a normal guide with diagonal covariance, Adam.

    Parameters are means of the second half of the iterations.  Noise is for the substitute
    relation.  Clip norm and learning rate are those with the least error of the mean on data sets
    of their own, whose truth is known.
    """
    import d3p.random
    import jax
    import jax.numpy as jnp
    from d3p.dputil import approximate_sigma
    from d3p.minibatch import subsample_batchify_data
    from d3p.svi import DPSVI
    from numpyro.infer import Trace_ELBO
    from numpyro.infer.autoguide import AutoDiagonalNormal
    from numpyro.optim import Adam

    x, y, n, batch = given["x"], given["y"], given["x"].shape[1], int(given["batch"])
    x, y = x.astype(np.float32), y.astype(np.float32)
    steps, model = int(given["steps"]), _declare(str(given["kind"]))
    sigma, _, _ = approximate_sigma(
        float(given["epsilon"]), float(given["delta"]), batch / n, steps, force_smaller=True
    )

    def built(clip: float, rate: float) -> Callable[[Any, Any, int], np.ndarray]:
        guide = AutoDiagonalNormal(model)
        svi = DPSVI(
            model, guide, Adam(rate), Trace_ELBO(), clipping_threshold=clip, dp_scale=sigma, n=n
        )
        start = svi.init(d3p.random.PRNGKey(0), x[0, :batch], y[0, :batch])

        @jax.jit
        def run(x: Any, y: Any, key: Any) -> Any:
            batches, begin = d3p.random.split(key, 2)
            state = start._replace(rng_key=begin)
            _, get_batch = subsample_batchify_data((x, y), batch_size=batch)

            def step(state: Any, i: Any) -> Any:
                state, _ = svi.update(state, *get_batch(i, batches))
                return state, svi.optim.get_params(state.optim_state)

            _, trace = jax.lax.scan(step, state, jnp.arange(steps))
            mean = jax.tree_util.tree_map(lambda a: a[steps // 2 :].mean(axis=0), trace)
            return svi.constrain_fn(mean)

        def fit(x: Any, y: Any, seed: int) -> np.ndarray:
            found = run(x, y, d3p.random.PRNGKey(seed))
            draws = guide.sample_posterior(jax.random.PRNGKey(seed), found, sample_shape=(DRAWS,))
            columns = [np.asarray(draws[name]).reshape(DRAWS, -1) for name in sorted(draws)]
            return np.hstack(columns)

        return fit

    tried = {}
    for clip, rate in product(CLIP_NORMS, RATES):
        fit = built(clip, rate)
        errors = [
            np.mean((fit(x[k], y[k], 100 + k).mean(axis=0) - given["truth"][k]) ** 2)
            for k in range(int(given["tuning"]))
        ]
        tried[np.nan_to_num(np.mean(errors), nan=np.inf)] = clip, rate, fit
    clip, rate, fit = tried[min(tried)]
    seconds: list[float] = []
    draws = []
    for k in range(int(given["tuning"]), len(x)):
        with _seconds(seconds):
            draws.append(fit(x[k], y[k], k))
    return {"draws": draws, "seconds": seconds, "settings": [sigma, clip, rate]}


def noise_aware_dpvi(given: Arrays) -> Arrays:
    """Alrawajfeh, Jälkö & Honkela (2025): their DP-SGD, from a checkout of their code.

    Settings are theirs, but for the number of iterations (10,000 of theirs take 50 seconds) and for
    noise that serves the substitute relation.  Their model of the trace of noisy gradients has one
    optimum, curvature and sampling variance for each variational parameter, independent of the
    others a priori and a posteriori.  Here it is integrated on a grid, in place of their NUTS with
    dense matrices, which takes many minutes.
    """
    import types

    for name in ("opacus", "opacus.accountants", "opacus.accountants.utils"):
        sys.modules[name] = types.ModuleType(name)  # which would only choose the noise
    sys.modules["opacus.accountants.utils"].get_noise_multiplier = None  # type: ignore[attr-defined]
    sys.path.insert(0, str(given["path"]))
    try:
        import coverage_experiment as theirs
        import noise_aware_dpsgd as dpsgd
    except AttributeError as error:
        raise ImportError(f"their code needs an older JAX: {error}") from error
    import jax
    import jax.numpy as jnp
    from d3p.dputil import approximate_sigma

    kind, x, y = str(given["kind"]), given["x"], given["y"]
    defaults, d = {
        "linear": (theirs.set_default_args_linear_regression10d, x.shape[2] + 1),
        "bernoulli": (theirs.set_default_args_beta_bernoulli, 1),
        "exponential": (theirs.set_default_args_gamma_exponential, 1),
    }[kind]
    args = defaults(theirs.DynamicAttributes())
    args.training_iterations = int(given["iterations"])
    args.theta_dimension = d
    args.custom_noise_scale, _, _ = approximate_sigma(
        float(given["epsilon"]),
        float(given["delta"]),
        args.sampling_rate,
        args.training_iterations,
        force_smaller=True,
    )
    rows = [x, y] if kind == "linear" else [y, np.zeros_like(y)]
    seconds: list[float] = []
    draws = []
    for k in range(int(given["tuning"]), len(x)):
        with _seconds(seconds):
            args.train_xs, args.train_ys = (jnp.asarray(r[k], jnp.float32) for r in rows)
            args.algorithm_prng_key = jax.random.PRNGKey(k)
            found = dpsgd.perform_dpsgd(args, theirs.DynamicAttributes())
            found = dpsgd.calculate_hessian_and_optimal_phi_priors(args, found)
            rng = np.random.default_rng(k)
            optimum = _optima(rng, args, found)
            theta = optimum[:, :d] + _softplus(optimum[:, d:]) * rng.standard_normal((DRAWS, d))
        if kind == "bernoulli":
            theta = 1.0 / (1.0 + np.exp(-theta))
        else:
            theta[:, -1] = _softplus(theta[:, -1])
        draws.append(theta)
    return {"draws": draws, "seconds": seconds, "settings": [args.custom_noise_scale]}


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, x)


def _optima(rng: np.random.Generator, args: Any, found: Any) -> np.ndarray:
    """(draws, parameters) of the optimum, if gradients are N(q h (phi - optimum), s^2 + sd^2)."""
    burn_in = int(args.trace_burn_in_percentage * found.phi_trace.shape[0])
    phi, g = (np.asarray(a, float)[burn_in:] for a in (found.phi_trace, found.gradient_trace))
    ones, t, columns = np.ones(args.theta_dimension), len(phi), []
    scales = np.concatenate(
        [ones * args.mu_gradient_scale, ones * args.pre_transformed_covariance_gradient_scale]
    )
    sds = found.dpsgd_noise_scale * args.clipping_threshold / scales
    s = np.linspace(-3.0, 3.0, 13)[:, None]
    for j, sd in enumerate(sds):
        centre = float(found.phi_prior_mean[j])
        z = np.linspace(-6.0, 6.0, 1001)
        raw = float(found.hessian_prior_mean[j]) + float(found.hessian_prior_std[j]) * z
        slope, variance = args.sampling_rate * _softplus(raw), sd**2 + s**2
        p, u = phi[:, j] - centre, g[:, j]
        rest = u.sum() - slope * p.sum()
        squares = u @ u - 2.0 * slope * (u @ p) + slope**2 * (p @ p)
        precision = 1.0 + t * slope**2 / variance
        mean = -slope * rest / variance / precision
        log_mass = -0.5 * (t * np.log(variance) + squares / variance + np.log(precision))
        log_mass += 0.5 * precision * mean**2 - 0.5 * z**2 - 0.5 * s**2
        mass = np.exp(log_mass - log_mass.max()).ravel()
        cell = rng.choice(mass.size, DRAWS, p=mass / mass.sum())
        noise = rng.standard_normal(DRAWS) / np.sqrt(precision.ravel()[cell])
        columns.append(centre + mean.ravel()[cell] + noise)
    return np.column_stack(columns)


# -- private point estimates ----------------------------------------------------------------------


def diffprivlib(given: Arrays) -> Arrays:
    """Linear regression by the functional mechanism, logistic by objective perturbation; pure.

    Bounds of features are those with the least error on the data sets of the public search.
    """
    from diffprivlib.models import LinearRegression, LogisticRegression

    epsilon, tuning = float(given["epsilon"]), int(given["tuning"])
    seconds: list[float] = []

    def fit(k: int, bound: float) -> np.ndarray:
        features = given["x"][k][:, :-1]  # the last column is that of the intercept
        if str(given["kind"]) == "linear":
            outcomes = (-float(given["bound_y"]), float(given["bound_y"]))
            found = LinearRegression(
                epsilon=epsilon, bounds_X=(-bound, bound), bounds_y=outcomes, random_state=k
            )
        else:
            norm = float(given["norm"])
            found = LogisticRegression(
                epsilon=epsilon, data_norm=norm, max_iter=1000, random_state=k
            )
        with _seconds(seconds):
            found.fit(features, given["y"][k])
        return np.append(np.ravel(found.coef_), found.intercept_)

    def error(bound: float) -> float:
        truth = given["truth"][:tuning, : given["x"].shape[2]]
        return float(np.mean([(fit(k, bound) - truth[k]) ** 2 for k in range(tuning)]))

    bound = min((1.0, 2.0, 3.0, 4.0), key=error) if tuning else 1.0
    del seconds[:]
    points = [fit(k, bound) for k in range(tuning, len(given["x"]))]
    return {"points": points, "seconds": seconds, "settings": [bound]}


def opendp(given: Arrays) -> Arrays:
    """OpenDP's linear regression, by Theil-Sen medians: one predictor, pure epsilon."""
    import opendp.prelude as dp

    dp.enable_features("contrib", "floating-point", "honest-but-curious", "idealized-numerics")

    def built(scale: float) -> Any:
        return dp.sklearn.linear_model.LinearRegression(
            dp.max_divergence(),
            x_bounds=[(-float(given["bound_x"]), float(given["bound_x"]))],
            y_bounds=(-float(given["bound_y"]), float(given["bound_y"])),
            scale=scale,
        )

    low, high = 1e-3, 1e6  # replacing a record adds one and removes one: distance 2
    while high / low > 1.0001:
        middle = float(np.sqrt(low * high))
        enough = built(middle).measurement.map(2) <= float(given["epsilon"])
        low, high = (low, middle) if enough else (middle, high)
    fit = built(high)
    seconds: list[float] = []
    points = []
    for k in range(int(given["tuning"]), len(given["x"])):
        with _seconds(seconds):
            found = fit.fit(given["x"][k][:, :1], given["y"][k])
        points.append([float(found.coef_[0]), float(found.intercept_)])
    return {"points": points, "seconds": seconds, "settings": [high]}


# -- not private ----------------------------------------------------------------------------------


def numpyro_ecs(given: Arrays) -> Arrays:
    """NumPyro's HMCECS, second-order proxies about the mode, mass from the curvature there."""
    import jax
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import HMC, HMCECS, MCMC

    jax.config.update("jax_enable_x64", True)
    x, y, m = jax.numpy.asarray(given["x"]), jax.numpy.asarray(given["y"]), int(given["m"])

    def declared(x: Any, y: Any) -> None:
        prior = dist.Normal(0, float(given["prior_sd"])).expand([x.shape[1]]).to_event(1)
        beta = numpyro.sample("beta", prior)
        with numpyro.plate("records", len(x), subsample_size=m):
            rows, outcomes = numpyro.subsample(x, 1), numpyro.subsample(y, 0)
            numpyro.sample("y", dist.Bernoulli(logits=rows @ beta), obs=outcomes)

    hmc = HMC(
        declared,
        step_size=0.2,
        num_steps=6,
        trajectory_length=None,  # or it would take the place of the step size
        adapt_step_size=False,
        dense_mass=True,
        inverse_mass_matrix=given["covariance"],
        adapt_mass_matrix=False,
    )
    start = {"beta": given["mode"]}
    kernel = HMCECS(hmc, num_blocks=100, proxy=HMCECS.taylor_proxy(start, degree=2))
    seconds: list[float] = []
    for number in (20, int(given["draws"])):
        chain = MCMC(kernel, num_warmup=10, num_samples=number, progress_bar=False)
        chain.warmup(jax.random.PRNGKey(0), x, y, init_params=start, collect_warmup=False)
        with _seconds(seconds):
            chain.run(jax.random.PRNGKey(2), x, y)
            draws = np.asarray(chain.get_samples()["beta"])
    # every run compiles, which is not counted: the first makes 20 draws
    return {"draws": draws, "seconds": [(seconds[1] - seconds[0]) * len(draws) / (len(draws) - 20)]}


def blackjax(given: Arrays) -> Arrays:
    """BlackJAX's SGLD or SGHMC, control variates at the mode, in coordinates of unit covariance."""
    import blackjax
    import jax
    import jax.numpy as jnp
    from blackjax.sgmcmc.gradients import control_variates, grad_estimator

    jax.config.update("jax_enable_x64", True)
    x, y = jnp.asarray(given["x"]), jnp.asarray(given["y"])
    n, d, m, mode = len(x), x.shape[1], int(given["m"]), jnp.asarray(given["mode"])
    root = jnp.linalg.cholesky(jnp.asarray(given["covariance"]))

    def log_prior(u: Any) -> Any:
        return -0.5 * jnp.sum((mode + root @ u) ** 2) / float(given["prior_sd"]) ** 2

    def log_likelihood(u: Any, row: Any) -> Any:
        eta = row[0] @ (mode + root @ u)
        return row[1] * eta - jnp.logaddexp(0.0, eta)

    score = control_variates(grad_estimator(log_prior, log_likelihood, n), jnp.zeros(d), (x, y))
    sampler = blackjax.sgld(score) if str(given["kind"]) == "sgld" else blackjax.sghmc(score)
    draws, rate = int(given["draws"]), float(given["step_size"])

    @jax.jit
    def chain(key: Any, start: Any) -> Any:
        def step(u: Any, key: Any) -> Any:
            pick, move = jax.random.split(key)
            rows = jax.random.randint(pick, (m,), 0, n)
            u = sampler.step(move, u, (x[rows], y[rows]), rate)
            return u, u

        return jax.lax.scan(step, start, jax.random.split(key, draws))

    last, _ = chain(jax.random.PRNGKey(0), sampler.init(jnp.zeros(d)))  # compiles, burns in
    seconds: list[float] = []
    with _seconds(seconds):
        _, u = jax.block_until_ready(chain(jax.random.PRNGKey(1), last))
    return {"draws": np.asarray(mode + u @ root.T), "seconds": seconds}


def nutpie(given: Arrays) -> Arrays:
    """nutpie's NUTS on all records; the time of the draws that are kept."""
    import nutpie
    import pymc as pm

    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, float(given["prior_sd"]), shape=given["x"].shape[1])
        pm.Bernoulli("y", logit_p=given["x"] @ beta, observed=given["y"])
    compiled = nutpie.compile_pymc_model(model)
    seconds: list[float] = []
    with _seconds(seconds):
        idata = nutpie.sample(
            compiled,
            draws=int(given["draws"]),
            tune=200,
            chains=1,
            cores=1,
            seed=7,
            progress_bar=False,
            save_warmup=True,
        )
    steps = float(idata.sample_stats["n_steps"].sum())
    share = steps / (steps + float(idata.warmup_sample_stats["n_steps"].sum()))
    return {"draws": idata.posterior["beta"].values[0], "seconds": [share * seconds[0]]}


# -- data -----------------------------------------------------------------------------------------


def adult(given: Arrays) -> Arrays:
    """The UCI Adult data that the package xai ships: raw columns, as text."""
    import csv
    from importlib.util import find_spec
    from pathlib import Path

    found = find_spec("xai")
    if found is None or found.origin is None:
        raise ImportError("No module named 'xai'")
    with (Path(found.origin).parent / "data" / "census.csv").open(encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    return {"head": head, "rows": [[cell.strip() for cell in row] for row in rows]}


SCRIPTS = (dpvi, noise_aware_dpvi, diffprivlib, opendp, numpyro_ecs, blackjax, nutpie, adult)


def versions() -> dict[str, str]:
    """Of the packages that are installed here."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main() -> int:
    """Command line."""
    if sys.argv[1] == "versions":
        print(json.dumps(versions()))
        return 0
    name, source, target = sys.argv[1:]
    [script] = [script for script in SCRIPTS if script.__name__ == name]
    try:
        found = script(dict(np.load(source)))
    except ImportError as error:
        print(error, file=sys.stderr)
        return MISSING
    np.savez(target, **{key: np.asarray(value) for key, value in found.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
