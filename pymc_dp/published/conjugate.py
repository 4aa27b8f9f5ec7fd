"""Exact draws of parameters whose conditional distribution is normal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pymc as pm
import pytensor
from pymc.model import Model
from pymc.util import get_random_generator, get_value_vars_from_user_vars
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors

from pymc_dp.base.compiled_step import CompiledStep
from pymc_dp.published.graphs import Function
from pymc_dp.records.graph import ParameterVector

_TRIALS = 3
_TOLERANCE = 1e-6


class ConjugateNormal(CompiledStep):
    """Draws parameters from their conditional distribution, where that is normal.

    For coefficients with normal priors that enter the mean of normal records linearly, with the
    other variables given (``dp.PrivacyAwareGibbs``, or any other step).  Far cheaper than NUTS, and
    without tuning.

    Parameters
    ----------
    vars : list of variables
        Continuous parameters without transforms, drawn jointly.
    model : pymc.Model, optional
        Default: the model of the context.
    rng : optional
        As in PyMC.
    compile_kwargs, initial_point, blocked
        For PyMC.

    Raises
    ------
    ValueError
        If the log-density of the model is not quadratic in these parameters.

    Notes
    -----
    *Guarantee.*  The draw is exact up to rounding: the gradient of a quadratic log-density is
    linear, so d + 1 gradients give it all.  That it is quadratic is checked at random points when
    the step is built, and where each chain starts.

    *Weaknesses.*  One draw takes d + 1 gradients, each over all records.
    """

    name = "conjugate_normal"
    stats_dtypes_shapes: dict[str, Any] = {}  # noqa: RUF012 - PyMC reads it from the class
    _made = ("_function",)

    def __init__(
        self,
        vars: Sequence[Variable],
        *,
        model: Model | None = None,
        rng: Any = None,
        compile_kwargs: dict[str, Any] | None = None,
        initial_point: Any = None,
        blocked: bool = True,
    ) -> None:
        model = pm.modelcontext(model)
        self.vars = get_value_vars_from_user_vars(vars, model)
        for value in self.vars:
            rv = model.values_to_rvs[value]
            if not value.type.dtype.startswith("float"):
                raise ValueError(f"ConjugateNormal: `{rv.name}` is discrete.")
            if model.rvs_to_transforms[rv] is not None:
                raise ValueError(
                    f"ConjugateNormal: `{rv.name}` has bounds, so its conditional distribution is "
                    "not normal. Leave it to NUTS."
                )
        start = model.initial_point()
        self.vector = ParameterVector.of(self.vars, [np.shape(start[v.name]) for v in self.vars])
        self.rest = [v for v in model.value_vars if v not in self.vars]
        self.rng = get_random_generator(rng)
        terms = self.vector.substitute(model.logp(sum=False))
        # the others, among them densities of releases, are constants
        depend = [term.sum() for term in terms if self.vector.theta in ancestors([term])]
        log_density = sum(depend[1:], depend[0])
        gradient = pytensor.grad(log_density, self.vector.theta, disconnected_inputs="ignore")
        self._graphs = [gradient, log_density.astype("float64")]
        self._compile()
        self._check_at_random_points(start)

    def _compile(self) -> None:
        self._function = Function([self.vector.theta, *self.rest], self._graphs)
        self._begin()

    def _begin(self) -> None:
        self._checked = False

    def _at(self, theta: np.ndarray, rest: Sequence[np.ndarray]) -> tuple[np.ndarray, float]:
        gradient, log_density = self._function(theta, *rest)
        return np.array(gradient), float(log_density)

    def _check_at_random_points(self, start: dict[str, np.ndarray]) -> None:
        rng = np.random.default_rng(11)
        for _ in range(_TRIALS):
            rest = [np.asarray(start[v.name]) for v in self.rest]
            rest = [
                x + rng.standard_normal(x.shape).astype(x.dtype) if x.dtype.kind == "f" else x
                for x in rest
            ]
            self._check(rest, rng)

    def _check(self, rest: Sequence[np.ndarray], rng: np.random.Generator) -> None:
        """A gradient is linear if it adds up; the log-density is its integral where none jumps."""
        a, b = rng.standard_normal((2, self.vector.size))
        points = a, b, a + b, np.zeros(len(a))
        found = [self._at(theta, rest) for theta in points]
        of_a, of_b, of_both, of_none = (gradient for gradient, _ in found)
        size = 1.0 + sum(np.abs(gradient).max() for gradient, _ in found)
        linear = np.abs(of_both + of_none - of_a - of_b).max() <= _TOLERANCE * size
        levels = [level for _, level in found]
        rises = [
            0.5 * float((gradient + of_none) @ theta)  # exact for a quadratic
            for theta, (gradient, _) in zip(points, found, strict=True)
        ]
        possible = linear and bool(np.isfinite(levels).all())
        errors = np.abs(np.array(levels) - levels[-1] - rises) if possible else np.inf
        if not (errors <= _TOLERANCE * (size + np.abs(levels))).all():
            raise ValueError(
                f"ConjugateNormal: the model is not normal in {[v.name for v in self.vars]} given "
                "everything else: their priors must be normal, and they must enter means of "
                "normal variables linearly. Leave them to NUTS."
            )

    def step(self, point: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[Any]]:
        """One draw.

        Parameters
        ----------
        point : dict of str to array
            Values of all variables, on PyMC's unconstrained scale.

        Returns
        -------
        dict, list of dict
            The new point, and the statistics of the iteration.
        """
        rest = [np.asarray(point[v.name]) for v in self.rest]
        if not self._checked:
            self._check(rest, np.random.default_rng(11))
            self._checked = True
        d = self.vector.size
        at_zero, level = self._at(np.zeros(d), rest)
        precision = np.array([at_zero - self._at(unit, rest)[0] for unit in np.eye(d)])
        lower = np.linalg.cholesky(0.5 * (precision + precision.T))
        half = np.linalg.solve(lower, at_zero) + self.rng.standard_normal(d)
        theta = np.linalg.solve(lower.T, half)
        self._verify(theta, rest, at_zero, precision, level)
        return {**point, **self.vector.point(theta)}, [{}]

    def _verify(
        self,
        theta: np.ndarray,
        rest: Sequence[np.ndarray],
        at_zero: np.ndarray,
        precision: np.ndarray,
        level: float,
    ) -> None:
        """Where the draw fell, gradient and log-density are those of the normal distribution."""
        gradient, log_density = self._at(theta, rest)
        rise = float(at_zero @ theta - 0.5 * theta @ precision @ theta)
        terms = 1.0 + abs(level) + abs(log_density) + abs(float(at_zero @ theta))
        jumped = not abs(log_density - level - rise) <= 1e-3 + 1e-9 * terms
        sizes = np.abs(at_zero) + np.abs(precision) @ np.abs(theta)
        error = np.abs(gradient - (at_zero - precision @ theta))
        # a standard deviation's worth of gradient in each direction is the least that counts
        scale = 1e-3 * np.sqrt(np.abs(np.diag(precision))) + 1e-9 * sizes
        if jumped or not (error <= scale).all():
            raise ValueError(
                f"ConjugateNormal: the model is not normal in {[v.name for v in self.vars]} given "
                "everything else. Leave them to NUTS."
            )
