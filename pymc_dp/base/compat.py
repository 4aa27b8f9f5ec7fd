"""The seam between PyMC 5 and PyMC 6 (and their PyTensor): nothing else knows the version."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr
from pymc.model import Model
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

try:  # PyTensor 3
    from pytensor.gradient import pushforward as pushforward
except ImportError:  # PyTensor 2
    from pytensor.gradient import Rop as pushforward  # noqa: F401

try:  # PyTensor 3
    from pytensor.tensor.special import LogSumExp
except ImportError:  # PyTensor 2 has no such operation
    LogSumExp = None

try:  # PyTensor 2
    from pytensor.tensor.subtensor import AdvancedIncSubtensor1, AdvancedSubtensor1
except ImportError:  # PyTensor 3 merged them into AdvancedIncSubtensor, AdvancedSubtensor
    AdvancedIncSubtensor1 = AdvancedSubtensor1 = None

try:  # PyTensor 3
    from pytensor.tensor.linalg import SolveTriangular as SolveTriangular
except ImportError:  # PyTensor 2
    from pytensor.tensor.slinalg import SolveTriangular  # noqa: F401

PYMC_MAJOR = int(pm.__version__.split(".")[0])

#: For a copy that shares no graph within an operation.  PyTensor 2 rewrites these in place, with
#: the lengths of constants as numbers; those of PyTensor 3 do not change.
OWN_INNER_GRAPHS = {"clone_inner_graphs": True} if PYMC_MAJOR < 6 else {}


def _as_index(entry: Any) -> Any:
    """Slices of slices, with constants read off; other entries unchanged."""
    if isinstance(entry, Constant) and isinstance(entry.data, slice):
        return entry.data
    if isinstance(entry, Variable) and getattr(entry, "owner", None) is not None:
        if type(entry.owner.op).__name__ == "MakeSlice":
            return slice(*[None if _is_none(x) else x for x in entry.owner.inputs])
    if isinstance(entry, Constant) and entry.data is None:
        return None
    return entry


def _is_none(entry: Any) -> bool:
    return isinstance(entry, Constant) and entry.data is None


def subtensor_indices(node: Apply) -> list[Any]:
    """The index of a basic subtensor node as a list of slices and scalars."""
    assert isinstance(node.op, Subtensor)
    return list(indices_from_subtensor(node.inputs[1:], node.op.idx_list))


def advanced_indices(node: Apply) -> list[Any]:
    """The index of an advanced subtensor node as a list of slices and integer arrays."""
    idx_list = getattr(node.op, "idx_list", None)
    if idx_list is None:  # PyTensor 2: every index is an input
        return [_as_index(entry) for entry in node.inputs[1:]]
    return [_as_index(entry) for entry in indices_from_subtensor(node.inputs[1:], idx_list)]


# -- the call of pm.sample ------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleCall:
    """The arguments of the ``pm.sample`` call in progress."""

    draws: int
    tune: int
    chains: int
    model: Model
    step: Any
    var_names: Any = None


def sample_call() -> SampleCall | None:
    """What ``pm.sample`` was called with, seen from a step method; ``None`` outside of it.

    Neither PyMC 5 nor PyMC 6 tells a step method how long its chains will be before they start,
    so the frame of ``pm.sample`` is read.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "sample" and frame.f_globals.get("__name__") == (
            "pymc.sampling.mcmc"
        ):
            found = frame.f_locals
            if all(name in found for name in ("draws", "tune", "chains", "model", "step")):
                return SampleCall(
                    int(found["draws"]),
                    int(found["tune"]),
                    int(found["chains"]),
                    pm.modelcontext(found["model"]),
                    found["step"],
                    found.get("var_names"),
                )
            return None
        frame = frame.f_back
    return None


def sample_into(trace: Any, **call: Any) -> None:
    """Call ``pm.sample`` for its trace alone: nothing is converted or checked."""
    with warnings.catch_warnings():  # PyMC 6.4 says that this argument will be gone
        warnings.filterwarnings("ignore", "`return_inferencedata=False`", FutureWarning)
        pm.sample(trace=trace, return_inferencedata=False, compute_convergence_checks=False, **call)


# -- results: InferenceData (PyMC 5) or DataTree (PyMC 6) -----------------------------------------


def is_result(found: Any) -> bool:
    """Whether this is a result with groups, as ``pm.sample`` returns it."""
    if PYMC_MAJOR >= 6:
        return isinstance(found, xr.DataTree)
    import arviz as az

    return isinstance(found, xr.DataTree | az.InferenceData)


def group_names(idata: Any) -> list[str]:
    """Names of the groups of a result."""
    names = idata.groups() if callable(idata.groups) else idata.groups
    return [name.strip("/") for name in names if name.strip("/")]


def group(idata: Any, name: str) -> xr.Dataset:
    """One group of a result as a data set of its own."""
    found = idata[name]
    dataset = found.to_dataset() if hasattr(found, "to_dataset") else found
    return dataset.copy()


def attributes(idata: Any) -> dict[str, Any]:
    """Attributes of a result: those of the whole before those of its posterior."""
    found = dict(getattr(idata, "attrs", None) or {})
    if "posterior" in group_names(idata):
        found = {**group(idata, "posterior").attrs, **found}
    return found


def inference_data(groups: Mapping[str, xr.Dataset], attrs: Mapping[str, Any]) -> Any:
    """A result of the kind that the installed PyMC returns."""
    marked = {name: dataset.assign_attrs(attrs) for name, dataset in groups.items()}
    if PYMC_MAJOR < 6:
        import arviz as az

        return az.InferenceData(attrs=dict(attrs), **marked)
    tree = xr.DataTree.from_dict({f"/{name}": dataset for name, dataset in marked.items()})
    tree.attrs.update(attrs)
    return tree


def effective_draws(values: np.ndarray) -> np.ndarray:
    """(d,) effective sample sizes of (chains, draws, d) values, over all chains."""
    n_chains, n_draws, d = values.shape
    if n_draws < 4:  # ArviZ has no answer
        return np.full(d, float(n_chains * n_draws))
    import arviz as az

    found = az.ess(xr.Dataset({"value": (("chain", "draw", "entry"), values)}))
    return np.asarray(found["value"].values)
