"""Arithmetic over leading batch axes: vectors are ``(..., d)``, scalars ``(...)``."""

from __future__ import annotations

import numpy as np

from pymc_dp.kernels.interfaces import Array, Mask, Prior


def all_finite(z: Array) -> Mask:
    """Whether every coordinate is finite, shape ``(...)``."""
    finite: Mask = np.logical_and.reduce(np.isfinite(z), axis=-1)
    return finite


def select(mask: Mask, yes: Array, no: Array) -> Array:
    """Vectors of ``yes`` where the mask holds, of ``no`` elsewhere."""
    if isinstance(mask, bool | np.bool_):
        return yes if mask else no
    return np.where(mask[..., None], yes, no)


def start_log_prior(z: Array, prior: Prior) -> Array:
    """Log prior density of a start position; a chain cannot leave a point of density zero."""
    log_prior = np.asarray(prior.log_density(z), dtype=float)
    if not (np.isfinite(z).all() and np.isfinite(log_prior).all()):
        raise ValueError(
            "The start position `z` or its log prior density is not finite; "
            "start the chain inside the support of the prior."
        )
    return log_prior
