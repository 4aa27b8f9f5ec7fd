"""Several owners beside one that has all records: time, and error of the posterior mean.

::

    python -m benchmarks.owners --quick
    python -m benchmarks.owners --json owners.json

A logistic regression with 10 features, whose records are split among three owners with the same
budget.  *Time*: anchored DPLangevin with 4 chains of 500 draws; three processes on this machine
with mutual TLS, and one process that has all records and as many chains.  *Error*: root mean square
error of posterior means, in posterior standard deviations, over repeats with the same records; it
should be sqrt(3) times as large.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import description

__all__ = ["errors", "times"]

D, OWNERS, EPSILON, DELTA = 10, 3, 4.0, 1e-7
STUDY = """
import pymc as pm

columns = {"x": ("float64", 10), "y": "int64"}


def build(x, y):
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=10)
        pm.Bernoulli("y", logit_p=pm.Data("x", x) @ beta, observed=y)
    return model
"""
OWNER = """
from pathlib import Path
import numpy as np
import pymc_dp as dp

here = Path(__file__).parent
rows = dict(np.load(here / "rows{k}.npz"))
owner = dp.Owner(
    here / "study.py", rows, {epsilon}, {delta}, ledger=here / "ledger{k}", dataset="owner {k}"
)
"""


def rows(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Records."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, D))
    p = 1.0 / (1.0 + np.exp(-x @ np.linspace(-1.0, 1.0, D)))
    return {"x": x, "y": (rng.random(n) < p).astype(np.int64)}


def _written(n: int, folder: Path) -> dict[str, np.ndarray]:
    """All records; those of each owner, and the model, as files."""
    whole = rows(n)
    (folder / "study.py").write_text(STUDY)
    for k in range(OWNERS):
        np.savez(folder / f"rows{k}.npz", **{name: a[k::OWNERS] for name, a in whole.items()})
        text = OWNER.format(k=k, epsilon=EPSILON, delta=DELTA)
        (folder / f"owner{k}.py").write_text(text)
    return whole


def _serve(folder: Path, k: int) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "pymc_dp", "serve", str(folder / f"owner{k}.py")]
    command += ["--listen", "localhost:0", "--certificates", str(folder / "tls" / "localhost")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    port = line.split(" on localhost:")[1].split(",")[0]
    return process, f"localhost:{port}"


def _sampled(model: Any, draws: int, **kwargs: Any) -> dict[str, float]:
    """Seconds of the preparation, and of the chains."""
    import pymc_dp as dp

    begin = time.perf_counter()
    settings = {"form": "anchored", "progressbar": False}
    with model:
        step = dp.DPLangevin(draws=draws, chains=4, **settings)
        prepared = time.perf_counter()
        dp.sample(draws, chains=4, step=step, progressbar=False, random_seed=1, **kwargs)
    end = time.perf_counter()
    return {"preparation": prepared - begin, "chains": end - prepared}


def times(n: int, draws: int) -> dict[str, dict[str, float]]:
    """Seconds with all records in one process, and with three owners."""
    import pymc_dp as dp
    from pymc_dp.owners.network import make_certificates
    from pymc_dp.owners.study import ModelFile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = _written(n, folder)
        make_certificates(folder / "tls", ["localhost"])
        model = ModelFile(folder / "study.py").model(whole)
        with model:
            dp.PrivacyBudget(EPSILON, DELTA)
        found = {"pooled": _sampled(model, draws, cores=min(4, os.cpu_count() or 1))}
        served = [_serve(folder, k) for k in range(OWNERS)]
        try:
            owners = dp.Owners(
                [address for _, address in served],
                model_file=folder / "study.py",
                certificates=folder / "tls" / "analyst",
            )
            found["owners"] = _sampled(owners.model, draws)
        finally:
            for process, _ in served:
                process.kill()
                process.wait()
    return found


def errors(n: int, repeats: int) -> dict[str, float]:
    """RMSE of posterior means in posterior sds, pooled and with three owners, in one process."""
    import pymc_dp as dp

    squares: dict[str, list[float]] = {"pooled": [], "owners": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = _written(n, folder)
        exact, sd = _exact(whole)
        from pymc_dp.owners.study import ModelFile

        file = ModelFile(folder / "study.py")
        for _ in range(repeats):
            model = file.model(whole)
            with model:
                dp.PrivacyBudget(EPSILON, DELTA)
            studies = {"pooled": model}
            parts = [
                dp.Owner(
                    folder / "study.py", {k: a[j::OWNERS] for k, a in whole.items()}, EPSILON, DELTA
                )
                for j in range(OWNERS)
            ]
            studies["owners"] = dp.Owners(parts, model_file=folder / "study.py").model
            for kind, study in studies.items():
                drawn = dp.laplace(model=study, progressbar=False, draws=4000)
                mean = drawn["posterior"]["beta"].mean(("chain", "draw")).values
                squares[kind].append(float(np.mean(((mean - exact) / sd) ** 2)))
    return {kind: math.sqrt(float(np.mean(values))) for kind, values in squares.items()}


def _exact(whole: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Posterior mode and sds of all records, by Newton's method."""
    x, y, beta = whole["x"], whole["y"], np.zeros(D)
    for _ in range(30):
        p = 1.0 / (1.0 + np.exp(-x @ beta))
        precision = x.T @ (x * (p * (1.0 - p))[:, None]) + np.eye(D) / 4.0
        beta = beta + np.linalg.solve(precision, x.T @ (y - p) - beta / 4.0)
    return beta, np.sqrt(np.linalg.inv(precision).diagonal())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer records, draws and repeats")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.rows, args.draws, args.repeats = 10_000, 50, 2
    warnings.filterwarnings("ignore", "These data already have a budget")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(description())
    found = times(args.rows, args.draws)
    for kind, seconds in found.items():
        print(
            f"{kind:8s} preparation {seconds['preparation']:6.1f} s, "
            f"4 chains of {args.draws} draws {seconds['chains']:6.1f} s",
            flush=True,
        )
    ratio = sum(found["owners"].values()) / sum(found["pooled"].values())
    print(f"ratio of the whole: {ratio:.2f}")
    rmse = errors(args.rows, args.repeats)
    growth = rmse["owners"] / rmse["pooled"] / math.sqrt(OWNERS)
    print(
        f"RMSE of posterior means, in posterior sds: pooled {rmse['pooled']:.3f}, "
        f"3 owners {rmse['owners']:.3f}: sqrt(3) times {growth:.2f}"
    )
    if args.json is not None:
        cells = {"times": found, "rmse": rmse}
        args.json.write_text(json.dumps({"machine": description(), **cells}, indent=1))


if __name__ == "__main__":
    main()
