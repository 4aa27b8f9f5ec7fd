"""Random models: a likelihood of every accepted family, over predictors of every kind.

:func:`structures` draws what a model is, :func:`cases` a data set for it, with its privacy units,
and a point.  All data are ``pm.Data``, so that one compiled model serves many data sets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from hypothesis import strategies as st

CHOICES = 3

LOCATIONS = (
    "linear",
    "scalar",
    "intercept_and_linear",
    "centred",
    "slopes",
    "groups_and_linear",
    "crossed",
    "non_centred",
    "non_linear",
)
SCALES = ("known", "by_row", "shared", "grouped", "predicted")
#: Where the predictor is affine in the parameters, and the scale known.
AFFINE = frozenset(LOCATIONS) - {"non_centred", "non_linear"}
KNOWN = frozenset({"known", "by_row"})


@dataclass(frozen=True)
class Structure:
    """What a model is, whatever its data.

    Attributes
    ----------
    location : str
        How the predictor depends on the parameters, of :data:`LOCATIONS`.
    scale : str
        The same for the second parameter of the likelihood, of :data:`SCALES`.
    variant : {0, 1, 2}
        Link, or parameters, of the likelihood.
    width : int
        Columns of the design.
    groups : int
    users : bool
        Whether privacy units are users with any number of rows.
    """

    location: str
    scale: str
    variant: int
    width: int
    groups: int
    users: bool


@dataclass(frozen=True)
class Case:
    """A data set, and a point.

    Attributes
    ----------
    n : int
        Number of rows.
    occupied : int
        Groups that have rows, at most.
    owners : {"one", "few", "many", "sorted"}
        How rows belong to users.
    coordinates : {"identity", "diagonal", "dense"}
    block : int
        Rows per block.
    cached : int
        Numbers per block of vectors.
    seed : int
        Of all values.
    """

    n: int
    occupied: int
    owners: str
    coordinates: str
    block: int
    cached: int
    seed: int


structures = st.builds(
    Structure,
    location=st.sampled_from(LOCATIONS),
    scale=st.sampled_from(SCALES),
    variant=st.integers(0, 2),
    width=st.sampled_from([2, 1, 3, 4]),
    groups=st.integers(1, 6),
    users=st.booleans(),
)


def cases(rows: list[int], blocks: list[int]) -> st.SearchStrategy[Case]:
    """Data sets of these numbers of rows, read in blocks of these sizes."""
    return st.builds(
        Case,
        n=st.sampled_from(rows),
        occupied=st.integers(1, 6),
        owners=st.sampled_from(["one", "few", "many", "sorted"]),
        coordinates=st.sampled_from(["dense", "diagonal", "identity"]),
        block=st.sampled_from(blocks),
        cached=st.sampled_from([2**16, 1, 40]),
        seed=st.integers(0, 2**16),
    )


def columns(structure: Structure, case: Case) -> dict[str, np.ndarray]:
    """Every column that a model may ask for; predictors stay within a few units of 0."""
    rng, n = np.random.default_rng(case.seed), case.n
    occupied = rng.permutation(structure.groups)[: case.occupied]
    group = rng.choice(occupied, n)
    trials = rng.integers(1, 6, n)
    real = rng.normal(size=n)
    positive = 0.05 + rng.gamma(2.0, size=n)
    limit = rng.uniform(0.1, 1.5, n)
    m = n + 5
    return {
        "X": rng.uniform(-1.5, 1.5, (n, structure.width)),
        "x": rng.uniform(-1.5, 1.5, n),
        "group": group,
        "other": rng.integers(0, 3, n),
        "size": rng.uniform(0.5, 1.5, n),
        "trials": trials,
        "successes": rng.binomial(trials, 0.4),
        "real": real,
        "pair": rng.normal(size=(n, 2)),
        "positive": positive,
        "fraction": rng.uniform(0.05, 0.95, n),
        "binary": rng.integers(0, 2, n),
        "count": rng.poisson(2.0, n),
        "choice": rng.integers(0, CHOICES, n),
        "clipped": real.clip(-0.7, 0.7),
        "limit": limit,
        "limited": np.minimum(real, limit),
        "amount": positive * rng.integers(0, 2, n),
        "visit_x": rng.uniform(-1.5, 1.5, m),
        "visits": rng.poisson(2.0, m),
    }


def owners(case: Case, n: int) -> np.ndarray:
    """(n,) ids of the users that rows belong to: neither 0, 1, ... nor in order."""
    rng = np.random.default_rng(case.seed + 1)
    many = max(1, n // 3)
    size = {"one": 1, "few": 3, "many": many, "sorted": many}[case.owners]
    # most rows are of the first users
    ids = 1000 - 7 * np.minimum(rng.geometric(0.3, n) - 1, size - 1)
    return np.sort(ids) if case.owners == "sorted" else ids


class Table:
    """The columns of a data set, as ``pm.Data`` of the model that asks for them."""

    def __init__(self, structure: Structure, case: Case) -> None:
        self.structure = structure
        self._columns = columns(structure, case)
        self.used: dict[str, Any] = {}

    def __call__(self, name: str) -> Any:
        if name not in self.used:
            self.used[name] = pm.Data(name, self._columns[name])
        return self.used[name]

    def set(self, case: Case) -> None:
        """Give the model another data set."""
        found = columns(self.structure, case)
        for name, data in self.used.items():
            data.set_value(found[name].astype(data.type.dtype))  # PyMC chose the type


# -- parameters -----------------------------------------------------------------------------------


def location(t: Table, kind: str, name: str = "b", tail: tuple[int, ...] = ()) -> Any:
    """A predictor: a scalar, or one per row; with `tail`, a vector in the place of each number."""

    def normal(label: str, *shape: int) -> Any:
        return pm.Normal(f"{name}_{label}", 0.0, 1.0, shape=(*shape, *tail) or None)

    groups, width = t.structure.groups, t.structure.width
    if kind == "scalar":
        return normal("mu")
    if kind == "linear":
        return t("X") @ normal("beta", width)
    if kind == "intercept_and_linear":
        return normal("mu") + t("X") @ normal("beta", width)
    if kind == "non_linear":
        return normal("a") * pt.tanh(t("X") @ normal("beta", width))
    if kind == "centred":
        mu, tau = normal("mu"), pm.HalfNormal(f"{name}_tau", 1.0)
        return pm.Normal(f"{name}_alpha", mu, tau, shape=(groups, *tail))[t("group")]
    if kind == "non_centred":
        tau = pm.HalfNormal(f"{name}_tau", 1.0)
        return (normal("mu") + tau * normal("z", groups))[t("group")]
    alpha = normal("alpha", groups)[t("group")]
    if kind == "slopes":
        x = t("x")[:, None] if tail else t("x")
        return alpha + normal("slope", groups)[t("group")] * x
    if kind == "groups_and_linear":
        return alpha + t("X") @ normal("beta", width)
    assert kind == "crossed"
    return alpha + normal("gamma", 3)[t("other")]


def scale(t: Table, tail: bool = False) -> Any:
    """A positive number, or one per row."""
    kind = t.structure.scale
    if kind == "known":
        return 0.8
    if kind == "shared":
        return pm.HalfNormal("sigma", 1.0)
    if kind == "by_row":
        found = t("size")
    elif kind == "grouped":
        found = pm.HalfNormal("sigma", 1.0, shape=t.structure.groups)[t("group")]
    else:
        found = pt.exp(0.4 * location(t, "linear", "log_sigma"))
    return found[:, None] if tail else found


# -- likelihoods ----------------------------------------------------------------------------------

FAMILIES: dict[str, Callable[[Table, Any], None]] = {}


def family(declare: Callable[[Table, Any], None]) -> Callable[[Table, Any], None]:
    """Register a likelihood: a function of the data and of a function that makes the predictor."""
    FAMILIES[declare.__name__] = declare
    return declare


def declare(name: str, t: Table) -> pm.Model:
    """The model of a family."""
    with pm.Model() as model:
        FAMILIES[name](t, lambda *tail: location(t, t.structure.location, tail=tail))
    return model


def recognisable(name: str, structure: Structure) -> bool:
    """Whether rows have a concave term in one linear predictor that is found in the graph.

    Found is one that is the same for all rows for a normal observation alone.
    """
    location, known = structure.location, structure.scale in KNOWN
    if structure.users or location not in AFFINE:
        return False
    if name == "normal":
        return known
    if name == "gamma" and not (known and structure.variant != 2):
        return False
    return name in ("bernoulli", "binomial", "poisson", "gamma") and location != "scalar"


@family
def bernoulli(t: Table, eta: Any) -> None:
    if t.structure.variant == 0:
        pm.Bernoulli("y", logit_p=eta(), observed=t("binary"))
    else:
        link = [pm.math.sigmoid, pm.math.invprobit][t.structure.variant - 1]
        pm.Bernoulli("y", p=link(eta()), observed=t("binary"))


@family
def binomial(t: Table, eta: Any) -> None:
    pm.Binomial("y", n=t("trials"), logit_p=eta(), observed=t("successes"))


@family
def poisson(t: Table, eta: Any) -> None:
    exposure = t("size") if t.structure.variant == 1 else 1.0
    pm.Poisson("y", mu=exposure * pt.exp(eta()), observed=t("count"))


@family
def negative_binomial(t: Table, eta: Any) -> None:
    pm.NegativeBinomial("y", mu=pt.exp(eta()), alpha=scale(t), observed=t("count"))


@family
def normal(t: Table, eta: Any) -> None:
    pm.Normal("y", eta(), scale(t), observed=t("real"))


@family
def student_t(t: Table, eta: Any) -> None:
    nu = 2.0 + pm.HalfNormal("nu", 3.0) if t.structure.variant == 1 else 4.0
    pm.StudentT("y", nu=nu, mu=eta(), sigma=scale(t), observed=t("real"))


@family
def mv_normal(t: Table, eta: Any) -> None:
    if t.structure.variant == 0:
        shape = {"cov": np.eye(2) + 0.5}
    elif t.structure.variant == 1:
        sd = pm.HalfNormal.dist(1.0, shape=2)
        shape = {"chol": pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=sd)[0]}
    else:
        sigma = pm.HalfNormal("sigma", 1.0, shape=2)
        shape = {"cov": pt.diag(sigma) @ np.array([[1.0, 0.4], [0.4, 1.0]]) @ pt.diag(sigma)}
    pm.MvNormal("y", mu=eta(2), **shape, observed=t("pair"))


@family
def categorical(t: Table, eta: Any) -> None:
    pm.Categorical("y", p=pm.math.softmax(eta(CHOICES), axis=-1), observed=t("choice"))


@family
def ordered(t: Table, eta: Any) -> None:
    cutpoints = pm.Normal(
        "cutpoints",
        0.0,
        1.0,
        shape=CHOICES - 1,
        transform=pm.distributions.transforms.ordered,
        initval=[-1.0, 1.0],
    )
    pm.OrderedLogistic("y", eta=eta() * t("size"), cutpoints=cutpoints, observed=t("choice"))


@family
def gamma(t: Table, eta: Any) -> None:
    if t.structure.variant == 2:
        pm.Gamma("y", mu=pt.exp(eta()), sigma=scale(t), observed=t("positive"))
    else:
        pm.Gamma("y", alpha=scale(t), beta=pt.exp(eta()), observed=t("positive"))


@family
def beta(t: Table, eta: Any) -> None:
    if t.structure.variant == 0:
        pm.Beta("y", mu=pm.math.sigmoid(eta()), nu=1.0 + scale(t), observed=t("fraction"))
    else:
        pm.Beta("y", alpha=pt.exp(eta()), beta=scale(t), observed=t("fraction"))


@family
def mixture(t: Table, eta: Any) -> None:
    w = pm.Dirichlet("w", np.ones(2))
    if t.structure.variant == 0:
        parts = [pm.Normal.dist(eta(), scale(t)), pm.StudentT.dist(nu=3.0, mu=0.0, sigma=2.0)]
        pm.Mixture("y", w=w, comp_dists=parts, observed=t("real"))
    else:
        means = eta(2)
        pm.NormalMixture("y", w=w, mu=means, sigma=scale(t, tail=True), observed=t("real"))


@family
def zero_inflated(t: Table, eta: Any) -> None:
    psi = pm.Beta("psi", 1.0, 1.0)
    if t.structure.variant == 0:
        pm.ZeroInflatedPoisson("y", psi=psi, mu=pt.exp(eta()), observed=t("count"))
    else:
        pm.ZeroInflatedNegativeBinomial(
            "y", psi=psi, mu=pt.exp(eta()), alpha=scale(t), observed=t("count")
        )


@family
def hurdle(t: Table, eta: Any) -> None:
    psi = pm.Beta("psi", 1.0, 1.0)
    pm.HurdleGamma("y", psi=psi, alpha=scale(t), beta=pt.exp(eta()), observed=t("amount"))


@family
def censored(t: Table, eta: Any) -> None:
    latent = pm.Normal.dist(eta(), scale(t))
    if t.structure.variant == 0:
        pm.Censored("y", latent, lower=-0.7, upper=0.7, observed=t("clipped"))
    else:
        pm.Censored("y", latent, lower=None, upper=t("limit"), observed=t("limited"))


@family
def truncated(t: Table, eta: Any) -> None:
    latent = pm.Normal.dist(eta(), scale(t))
    pm.Truncated("y", latent, lower=0.0, observed=t("positive"))


@family
def several_observed(t: Table, eta: Any) -> None:
    """Of two lengths where units are users."""
    mu = eta()
    pm.Normal("y", mu, scale(t), observed=t("real"))
    if t.structure.users:
        rate = pt.exp(pm.Normal("c") * t("visit_x") + pm.Normal("e"))
        pm.Poisson("visits_of", mu=rate, observed=t("visits"))
    else:
        pm.Bernoulli("z", logit_p=mu, observed=t("binary"))


@family
def matrix_observations(t: Table, eta: Any) -> None:
    pm.Normal("y", eta(2), scale(t, tail=True), observed=t("pair"))
