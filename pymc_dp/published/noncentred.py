"""Moves of the parameters that take the records along: innovations are held, not records."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from pymc_dp.published.graphs import Function, forward, placed
from pymc_dp.published.innovations import HIGHEST, Innovation, innovation
from pymc_dp.published.proposals import State
from pymc_dp.published.reading import Reading
from pymc_dp.records.graph import ParameterVector

#: Draws of the prior from which the first reference normal is made.
_PRIOR_DRAWS = 400
#: Its weight, in draws, against what the chain sees while it tunes.
_PRIOR_WEIGHT = 20.0
#: A bracket is halved about this often before the parameters stay where they are.
_SHRINKS = 100


class NonCentred:
    """Elliptical slice moves of the parameters with the records' innovations held fixed.

    Innovations move the records in `latents`. By default these are all for which a formula is
    known, also those of other steps, which would hold shared parameters in place. A ValueError is
    raised if a variable that was asked for has no innovations, or no parameter can be moved.

    The target is the posterior of the parameters given the innovations and those records that are
    held themselves. It is sampled by elliptical slice sampling (Murray, Adams & MacKay 2010) with
    any normal distribution for a reference (Nishihara, Murray & Adams 2014): exact whatever the
    reference, which is learned from the prior and, while the chain tunes, from its draws.

    Far in the upper tail, records do not come back from the values of their distribution function.
    If there is such a record, nothing is moved. As innovations stay as they are, this holds on both
    sides of a move, which is what makes it harmless.
    """

    def __init__(self, reading: Reading, latents: Sequence[Variable] | None = None) -> None:
        model = reading.model
        known = {rv: innovation(rv) for rv in reading.all_records}
        found = {rv: f for rv, f in known.items() if f is not None}
        unknown = [rv.name for rv in latents or () if rv not in found]
        if unknown:
            raise ValueError(
                f"noncentered: no innovations are known for {unknown}. Leave these out."
            )
        wanted = found if latents is None else {rv: found[rv] for rv in latents}
        self.moved = _parents(reading, [rv for rv in reading.latents if rv in wanted])
        if not self.moved:
            raise ValueError(
                "noncentered: no continuous parameter stands directly behind the records, so "
                "nothing can be moved together with them."
            )
        self.latents = [
            rv
            for rv in model.free_RVs
            if rv in wanted and rv not in self.moved and set(ancestors([rv])) & set(self.moved)
        ]
        self.reading = reading
        values = [model.rvs_to_values[rv] for rv in self.moved]
        shapes = [np.shape(reading.start[v.name]) for v in values]
        self.vector = ParameterVector.of(values, shapes)
        self._where = [reading.others.index(rv) for rv in self.moved]
        self._places = [[*reading.latents, *reading.others].index(rv) for rv in self.latents]
        self._limited = [k for k, rv in enumerate(self.latents) if found[rv].limited]
        self._compile(found)
        self._learn_prior()
        self._check_round_trip()

    def _check_round_trip(self) -> None:
        """Records must come back from their innovations while the parameters stay."""
        values, parameters = self.reading.at_the_start
        both = [*values, *parameters]
        uniforms = [np.full(both[k].shape, 0.5) for k in self._places]
        held = self._innovations(*both, *uniforms)
        rest = [both[k] for k in self._rest]
        _, _, _, *back = self._target(self._theta(parameters), *rest, *held)
        for rv, k, found in zip(self.latents, self._places, back, strict=True):
            if not np.allclose(found, both[k], rtol=1e-4, atol=1e-4):
                raise ValueError(
                    f"noncentered: `{rv.name}` does not come back from its innovations. Leave it "
                    "out."
                )

    def _compile(self, found: dict[Variable, Innovation]) -> None:
        reading, model = self.reading, self.reading.model
        given = reading.constrained(model.free_RVs)
        held: list[Variable] = []
        uniforms: list[Variable] = []
        standardised: list[Variable] = []
        moved: dict[Variable, Variable] = {}
        new = {rv: x for rv, x in given.items() if rv not in self.latents}
        for rv in self.latents:
            w, u = (pt.tensor(dtype="float64", shape=(None,) * rv.type.ndim) for _ in range(2))
            standardised.append(found[rv].standardised(placed(rv, given), given[rv], w))
            here = placed(rv, new)
            new[rv] = found[rv].restored(here, u)
            moved[model.rvs_to_values[rv]] = forward(model, rv, new[rv], here)
            uniforms.append(w)
            held.append(u)
        others = [rv for rv in model.basic_RVs if rv not in self.latents]
        log_density = model.logp(vars=[*others, *model.potentials])
        [log_density] = clone_replace([log_density], moved, rebuild_strict=False)
        finite = pt.all([pt.all(pt.abs(v) < np.inf) for v in moved.values()])
        level = pt.switch(finite, log_density.astype("float64"), -np.inf)
        outputs = self.vector.substitute([level, *reading.factors(moved), *moved.values()])
        both = [*reading.latents, *reading.others]
        self._rest = [
            k for k, rv in enumerate(both) if rv not in self.moved and rv not in self.latents
        ]
        rest = [model.rvs_to_values[both[k]] for k in self._rest]
        self._innovations = Function([*reading.values, *reading.inputs, *uniforms], standardised)
        self._target = Function([self.vector.theta, *rest, *held], outputs)

    def _learn_prior(self) -> None:
        """A reference normal about the prior; robust, since priors may have heavy tails."""
        model = self.reading.model
        try:
            draw = Function([], [forward(model, rv, rv, rv) for rv in self.moved], compiled=False)
            draw.reseed(np.random.default_rng(0))  # a setting, the same in all chains
            theta = np.array(
                [np.concatenate([np.ravel(v) for v in draw()]) for _ in range(_PRIOR_DRAWS)]
            )
        except NotImplementedError:  # an improper prior cannot be drawn from
            theta = self.vector.ravel(self.reading.start)[None] + [[-1.0], [0.0], [1.0]]
        low, middle, high = np.quantile(theta, [0.16, 0.5, 0.84], axis=0)
        self._prior = middle, np.diag(np.maximum((high - low) / 2.0, 1e-6) ** 2)
        self.forget()

    def forget(self) -> None:
        """Begin a chain."""
        self._learned = 0
        self._restart()
        self._refer(*self._prior)

    def _refer(self, mean: np.ndarray, covariance: np.ndarray) -> None:
        self._location, self._root = mean, np.linalg.cholesky(covariance)
        self._whiten = np.linalg.inv(self._root)

    def learn(self, parameters: Sequence[np.ndarray]) -> None:
        """Take a tuning draw into account: the reference comes from the last half of them."""
        theta = self._theta(parameters)
        self._learned += 1
        self._seen += 1
        step = theta - self._mean
        self._mean += step / self._seen
        self._scatter += np.outer(step, theta - self._mean)
        if self._seen >= 2 * len(theta) and self._learned & (self._learned - 1) == 0:
            _, covariance = self._prior
            weight = _PRIOR_WEIGHT / (_PRIOR_WEIGHT + self._seen)
            learned = self._scatter / self._seen
            # the prior's own correlations are not known, and it may be very wide
            capped = np.diag(np.minimum(np.diag(covariance), 25.0 * np.diag(learned) + 1e-12))
            self._refer(
                self._mean.copy(),
                weight * capped + (1.0 - weight) * learned + 1e-12 * np.eye(len(theta)),
            )
            self._restart()

    def _restart(self) -> None:
        self._seen = 0
        self._mean = np.zeros(self.vector.size)
        self._scatter = np.zeros((self.vector.size, self.vector.size))

    def _theta(self, parameters: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.ravel(parameters[k]) for k in self._where]).astype(float)

    def __call__(self, state: State, rng: np.random.Generator) -> bool:
        """Move the parameters and records of `state`; False if a record is too far in a tail."""
        both = [*state.values, *state.parameters]
        uniforms = [rng.random(both[k].shape) for k in self._places]
        held = self._innovations(*both, *uniforms)
        if any((held[k] > HIGHEST).any() for k in self._limited):
            return False
        rest = [both[k] for k in self._rest]
        theta = self._theta(state.parameters)

        def target(theta: np.ndarray) -> tuple[float, list[np.ndarray]]:
            log_density, *found = self._target(theta, *rest, *held)
            white = self._whiten @ (theta - self._location)
            level = float(log_density) + 0.5 * float(white @ white)
            return (level if level == level else -math.inf), found

        level, _ = target(theta)
        if not math.isfinite(level):
            return True
        level += math.log(rng.random())
        offset = theta - self._location
        other = self._root @ rng.standard_normal(len(theta))
        angle = 2.0 * math.pi * rng.random()
        low, high = angle - 2.0 * math.pi, angle
        for _ in range(_SHRINKS):
            new = self._location + offset * math.cos(angle) + other * math.sin(angle)
            reached, found = target(new)
            if reached > level:
                self._take(state, new, found)
                break
            low, high = (angle, high) if angle < 0.0 else (low, angle)
            angle = low + (high - low) * rng.random()
        return True

    def _take(self, state: State, theta: np.ndarray, found: list[np.ndarray]) -> None:
        rows, local, *moved = found
        for k, x in zip(self._where, self.vector.point(theta).values(), strict=True):
            state.parameters[k] = x
        mine = len(state.values)
        for k, x in zip(self._places, moved, strict=True):
            if k < mine:
                state.values[k] = np.array(x)
            else:
                state.parameters[k - mine] = np.array(x)
        state.rows, state.local = np.ascontiguousarray(rows), np.array(local)
        state.add_up()


def _parents(reading: Reading, latents: Sequence[Variable]) -> list[Variable]:
    """Continuous parameters directly behind records, not behind other parameters alone."""
    others = set(reading.others)
    found: set[Variable] = set()
    for rv in latents:
        behind = ancestors(rv.owner.inputs, blockers=reading.model.free_RVs)
        found |= {v for v in behind if v in others and v.type.dtype.startswith("float")}
    return [rv for rv in reading.others if rv in found]
