"""Functions of records given by the user, computed from one record at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.basic import AllocEmpty
from pytensor.tensor.random.type import RandomType
from rich.progress import track

from pymc_dp.records.ancestry import is_long_array
from pymc_dp.records.arithmetic import is_discrete, without_wrapping
from pymc_dp.rows.functions import compile_function

_MADE_UP = 8  # made-up records among which one is to be seen to depend on others: not all are alike
_LONGEST_TABLE = 10_000  # entries of an array allowed where the number of records is private


def widened(array: np.ndarray) -> np.ndarray:
    """An array in the type in which statistics take it, without loss."""
    kind = array.dtype.kind
    small = kind in "iu" and array.dtype != "uint64"
    return np.ascontiguousarray(
        array, "float64" if kind == "f" else "int64" if small else array.dtype
    )


def _refuse_captured(rows: Variable, inputs: Iterable[Variable], n: int) -> None:
    """Refuse what a statistic could carry from record to record, or has captured of them."""
    for v in set(ancestors([rows])) - set(inputs):
        node = v.owner
        random = isinstance(v.type, RandomType)
        if random or (node is not None and isinstance(node.op, AllocEmpty)):
            raise ValueError("statistic must not be random: noise is added by the mechanism.")
        if isinstance(v, SharedVariable) and getattr(v, "default_update", None) is not None:
            raise ValueError(
                "statistic uses a shared variable that is updated from record to record."
            )
        if is_long_array(v, n):
            raise ValueError(
                "statistic uses an array with room for an entry per record. Pass what belongs to "
                "records as data; public tables must be shorter than the data, and than "
                f"{_LONGEST_TABLE} entries where the number of records is private."
            )


class RowByRow:
    """The statistic of each record, computed from that record alone.

    ``statistic(**arrays)`` is a tensor of shape (n,) (`scalar`), or (n, m), and `width` is m.  Only
    names, types and shapes of `arrays` are used.  If `whole`, rows must be integers; errors depend
    on n only if `n_is_public`.  Raises ValueError if a row depends on other records, on arrays with
    room for an entry per record, or on chance, or cannot be computed.
    """

    def __init__(
        self,
        arrays: dict[str, np.ndarray],
        statistic: Callable[..., Any],
        whole: bool = False,
        n_is_public: bool = True,
    ) -> None:
        blank = [np.zeros((1, *x.shape[1:]), x.dtype) for x in arrays.values()]
        inputs = {
            name: pt.TensorType(x.dtype.name, shape=(None, *x.shape[1:]))(name)
            for name, x in arrays.items()
        }
        try:
            rows = pt.as_tensor_variable(statistic(**inputs))
        except TypeError:
            raise ValueError(
                f"statistic must take the arrays by name, {sorted(arrays)}, and return a tensor. "
                "PyTensor has no x - y and no -x of truth values (use x.astype('int64')); it takes "
                "the constant True as np.array(True)."
            ) from None
        except AssertionError as error:  # how PyTensor 2 refuses a matrix for each record
            raise ValueError(
                "statistic fails an assertion, most often because an operation on one matrix, such "
                "as pt.linalg.eigh, is given one for each record. Apply it by pt.vectorize."
            ) from error
        # an error that depends on a private number would tell it
        longest = min(len(x) for x in arrays.values()) if n_is_public else _LONGEST_TABLE
        _refuse_captured(rows, inputs.values(), longest)
        if rows.type.ndim not in (1, 2):
            raise ValueError("statistic must return one row per record, of shape (n,) or (n, m).")
        if whole and not is_discrete(rows):
            raise ValueError(
                "mechanism='geometric' needs an integer statistic; use .astype('int64')."
            )
        self.scalar = rows.type.ndim == 1
        [rows] = without_wrapping([rows], "statistic", single=True)
        matrix = rows[:, None] if self.scalar else rows
        try:
            self._function = compile_function(list(inputs.values()), matrix.astype("float64"))
            shapes = {
                np.shape(self._function(*[np.full_like(x, k) for x in blank])) for k in (0, 1)
            }
            mixed = self._mixes(blank)
        except Exception:
            raise ValueError(
                "statistic cannot be computed for made-up records of zeros and ones."
            ) from None
        if len(shapes) != 1 or (found := shapes.pop())[0] != 1:
            raise ValueError(
                "statistic must return one row for one record, of a length that does not depend "
                "on it; arrays with one entry per record belong into data."
            )
        if mixed:
            raise ValueError(
                "statistic of one record depends on other records (a mean that is subtracted?). "
                "Compute each row from its own record and public numbers."
            )
        self.width = int(found[1])

    def _mixes(self, blank: list[np.ndarray]) -> bool:
        """Whether rows depend on other records; one by one they would then mean something else."""
        rng = np.random.default_rng(0)
        made_up = [
            rng.random((_MADE_UP, *x.shape[1:]))
            if x.dtype.kind == "f"
            else rng.integers(0, 2, (_MADE_UP, *x.shape[1:])).astype(x.dtype)
            for x in blank
        ]
        together = np.asarray(self._function(*made_up))
        alone = [self._function(*[x[i : i + 1] for x in made_up]) for i in range(_MADE_UP)]
        single = np.concatenate(alone)
        return together.shape != single.shape or not np.allclose(together, single, equal_nan=True)

    def compute(self, arrays: list[np.ndarray], progressbar: bool = False) -> np.ndarray:
        """(m, n) rows; one that cannot be computed is 0."""
        n = len(arrays[0])
        found = np.zeros((self.width, n))
        # rows shown are a function of n alone
        for i in track(range(n), "Computing rows", disable=not progressbar or n < 10**5):
            try:
                row = np.asarray(self._function(*[x[i : i + 1] for x in arrays]))
            except Exception:  # whatever it is, it would tell of the record
                continue
            if row.shape == (1, self.width):
                found[:, i] = row[0]
        return found
