"""Public structure of a model: group effects, what reaches a row together, and flat terms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pymc_dp.rows.groups import RowGroup

_WIDE, _LOOKS = (1.0, 3.0, 10.0), 3  # distances, relative to 1 + |theta|, and looks at each


def _places(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A point and one nearby: a derivative may vanish by chance at one (by tau at z = 0)."""
    return theta, theta + np.random.default_rng(0).uniform(0.05, 0.15, theta.size)


def index_blocks(groups: Sequence[RowGroup], theta: np.ndarray) -> list[np.ndarray]:
    """Blocks of parameters of which a row sees one entry at a time; the others are dense.

    A block's k >= 2 indices reach the rows through "index" cuts alone, each in one label of a cut,
    all in the same columns: the intercepts ``alpha[g]``, the ``z`` of ``(mu + tau * z)[g]``, each
    column of ``slopes[g]``.  Public: read from the zeros of d phi / d theta at a public `theta`.
    """
    dense: set[int] = set()
    labels: dict[int, set[tuple[int, int, int]]] = {}
    columns: dict[int, set[tuple[int, int, int]]] = {}
    for g, group in enumerate(groups):
        for at in _places(theta):
            phis, jacobians = group.functions.shared(at)
            for k, cut in enumerate(group.functions.ordered):
                jacobian = jacobians[k]
                if jacobian is None:
                    continue
                entries, parameters = np.nonzero(jacobian)
                if cut.kind != "index":
                    dense.update(parameters.tolist())
                    continue
                width = phis[k].size // len(phis[k])
                for entry, j in zip(entries.tolist(), parameters.tolist(), strict=True):
                    labels.setdefault(j, set()).add((g, k, entry // width))
                    columns.setdefault(j, set()).add((g, k, entry % width))
    found: dict[frozenset[tuple[int, int, int]], list[int]] = {}
    for j in sorted(labels.keys() - dense):
        if len(labels[j]) == len({(g, k) for g, k, _ in labels[j]}):
            found.setdefault(frozenset(columns[j]), []).append(j)
    return [np.array(block, dtype=np.int64) for block in found.values() if len(block) > 1]


def effects(groups: Sequence[RowGroup], theta: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Index blocks, and coordinates in which their entries are the effects that rows see.

    T, (d, d), of theta' = T theta is the identity, but for rows of a block: derivatives of its
    effects by theta, at a public `theta`.  For ``(mu + tau * z)[g]`` group means replace the ``z``:
    a row of a group has no score in ``mu`` and ``tau``, and the ridge along these needs no noise.
    """
    blocks = index_blocks(groups, theta)
    change = np.eye(theta.size)
    rows: dict[int, list[np.ndarray]] = {}
    members = {int(j) for block in blocks for j in block}
    for group in groups:
        _, jacobians = group.functions.shared(theta)
        for k, cut in enumerate(group.functions.ordered):
            jacobian = jacobians[k]
            if cut.kind != "index" or jacobian is None:
                continue
            for j in members:
                for entry in np.flatnonzero(jacobian[:, j]):
                    rows.setdefault(j, []).append(jacobian[entry])
    for block in blocks:
        # an effect that is seen through several cuts has no one row that stands for it
        if all(len(rows.get(int(j), [])) == 1 for j in block):
            for j in map(int, block):
                change[j] = rows[j][0]
    if not np.linalg.cond(change) < 1e8:
        change = np.eye(theta.size)
    return blocks, change


def touched(groups: Sequence[RowGroup], theta: np.ndarray, scaling: np.ndarray) -> np.ndarray:
    """(d, d) which coordinates of z, theta + scaling z, a row may see together; symmetric.

    Where False, the entry of every unit's curvature is 0; on the diagonal, that of every score.
    Public, as :func:`index_blocks`; also looked at far away: max(b, 0) is flat on one side.
    """
    d, rng = theta.size, np.random.default_rng(1)
    steps = np.repeat(_WIDE, _LOOKS)[:, None] * rng.standard_normal((_LOOKS * len(_WIDE), d))
    places = [*_places(theta), *(theta + steps * (1.0 + np.abs(theta)))]
    sizes = np.abs(scaling)
    pairs = np.zeros((d, d), dtype=bool)
    for group in groups:
        functions = group.functions
        supports: dict[int, np.ndarray] = {}  # per cut, (labels, d) of 0 and 1
        for number, at in enumerate(places if functions.varying else places[:1]):
            with np.errstate(all="ignore"):
                phis, jacobians = functions.shared(at)
            for k, (cut, jacobian) in enumerate(zip(functions.ordered, jacobians, strict=True)):
                if jacobian is None or (number and k not in functions.varying):
                    continue
                given = np.where(np.isfinite(jacobian), jacobian, 1.0)
                # what cancels leaves rounding errors
                moved = ~(np.abs(given @ scaling) - 1e-12 * (np.abs(given) @ sizes) <= 0.0)
                labels = len(phis[k]) if cut.kind == "index" else 1
                support = moved.reshape(labels, -1, d).any(axis=1).astype("float64")
                supports[k] = np.maximum(supports.get(k, 0.0), support)
        found = list(supports.values())
        for k, a in enumerate(found):
            pairs |= a.T @ a > 0.0
            for b in found[:k]:
                both = np.outer(a.any(axis=0), b.any(axis=0))
                pairs |= both | both.T
    return pairs


_ROWS = 16
_STEP = 1e-3
_ZERO = 1e-9


def is_flat(groups: Sequence[RowGroup], places: Sequence[np.ndarray]) -> bool:
    """Whether rows push a shared value by a force that does not change with it.

    As in Laplace likelihoods and quantile regression, whose curvature is zero almost everywhere and
    says nothing about the posterior.  Public: looked at on made-up rows, at public `places`.  If
    its parameters push anything else it does not count: Poisson terms ``y log(m) - m`` are both
    linear.
    """
    rng = np.random.default_rng(0)
    for group in groups:
        made_up = group.synthetic(_ROWS)
        functions = made_up.functions
        ones = functions.row_data(group.store.synthetic(_ROWS, 1).read())
        everywhere = None
        for theta in places:
            phis, jacobians = functions.shared(theta)
            alone = _alone(jacobians)
            etas, labels, zeros = made_up.inputs(phis, slice(0, _ROWS))
            etas = [rng.normal(size=eta.shape) for eta in etas]
            for blocks in (zeros, ones):
                flat = np.zeros(len(functions.ordered), dtype=bool)
                for k, smooth in enumerate(functions.differentiable):
                    if not (smooth and alone[k]):
                        continue
                    moved_etas, moved_phis = list(etas), list(phis)
                    moved = moved_etas if k < functions.n_dots else moved_phis
                    # not all by the same: choices do not see what is added to all of them
                    move = _STEP * rng.uniform(0.5, 1.5, np.shape(moved[k]))
                    # of the same type and number of axes, or numba compiles once more
                    moved[k] = np.asarray(moved[k] + move, dtype=moved[k].dtype, order="C")
                    with np.errstate(all="ignore"):
                        here = functions.scores(etas, phis, labels, blocks)[k]
                        there = functions.scores(moved_etas, moved_phis, labels, blocks)[k]
                    assert here is not None and there is not None
                    # a made-up outcome may be impossible, and its score infinite
                    same = np.isclose(there, here, rtol=_ZERO, atol=0.0) & np.isfinite(here)
                    flat[k] = np.mean(same & (here != 0.0)) > 0.5
                everywhere = flat if everywhere is None else everywhere & flat
        if everywhere is not None and everywhere.any():
            return True
    return False


def _alone(jacobians: Sequence[np.ndarray | None]) -> list[bool]:
    """Whether the parameters behind each shared value are behind no other."""
    behind = [None if j is None else np.any(j != 0.0, axis=0) for j in jacobians]
    many = sum(b.astype(int) for b in behind if b is not None)
    return [b is not None and not np.any(b & (many > 1)) for b in behind]
