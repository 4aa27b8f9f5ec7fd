"""The seam to PyMC: how it is called and calls, and what differs between PyMC 5 and PyMC 6.

Nothing else knows the version, of PyMC or PyTensor.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import xarray as xr
from pymc.model import Model
from pymc.step_methods.compound import BlockedStep, Competence, StepMethodState
from pymc.util import get_random_generator
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

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
            return slice(*map(_as_index, entry.owner.inputs))
    if isinstance(entry, Constant) and entry.data is None:
        return None
    return entry


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
    cores: int = 1


def sample_call() -> SampleCall | None:
    """What ``pm.sample`` was called with, read from its frame; ``None`` outside of it. PyMC does
    not tell a step method before the chains start how long they will be.
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
                    int(found.get("cores") or 1),
                )
            return None
        frame = frame.f_back
    return None


def sample_into(trace: Any, **call: Any) -> None:
    """Call ``pm.sample`` for its trace alone: nothing is converted or checked."""
    with warnings.catch_warnings():  # PyMC 6.4 says that this argument will be gone
        warnings.filterwarnings("ignore", "`return_inferencedata=False`", FutureWarning)
        pm.sample(trace=trace, return_inferencedata=False, compute_convergence_checks=False, **call)


@contextmanager
def working(what: str, progressbar: bool) -> Iterator[None]:
    """Show what is being done, and for how long."""
    bar = Progress(
        TextColumn(what),
        SpinnerColumn(finished_text=""),
        TimeElapsedColumn(),
        disable=not progressbar,
    )
    task = bar.add_task("", total=1.0)
    with bar:
        yield
        bar.update(task, completed=1.0)


# -- step methods --------------------------------------------------------------------------------


class NamedStep(BlockedStep):
    """A step method that users ask for, with statistics of its own in the progress bar."""

    default_blocked = True
    #: Titles and formats, by name of the statistic.
    _shown: Mapping[str, tuple[str, str]] = {}

    @staticmethod
    def competence(var: Any, has_grad: bool = False) -> Competence:
        """Never chosen automatically."""
        return Competence.INCOMPATIBLE

    def _about_to_sample(self, call: SampleCall | None) -> None:
        """``pm.sample`` was called, this way if it can be told."""

    def _progressbar_config(
        self, n_chains: int = 1
    ) -> tuple[list[TextColumn], dict[str, list[float]]]:
        self._about_to_sample(sample_call())
        columns = [
            TextColumn(f"{{task.fields[{name}]:{form}}}", table_column=Column(title, ratio=1))
            for name, (title, form) in self._shown.items()
        ]
        return columns, {name: [0.0] * n_chains for name in self._shown}

    def _make_progressbar_update_functions(self) -> tuple[Any, ...]:
        return (lambda stats: {name: stats[name] for name in self._shown},)


class CompiledStep(NamedStep):
    """A step method whose compiled functions are made again where a copy arrives."""

    _state_class = StepMethodState  # all that moves are variables of the model
    #: Attributes that :meth:`_compile` makes, and that are never pickled.
    _made: tuple[str, ...] = ()
    #: Iterations of a chain, where they are known.
    _planned: int | None = None

    @abstractmethod
    def _compile(self) -> None:
        """Make what is compiled, and begin a chain."""

    @abstractmethod
    def _begin(self) -> None:
        """Begin a chain with the generator that it was given."""

    def _about_to_sample(self, call: SampleCall | None) -> None:
        if call is not None:
            self._planned = call.draws + call.tune

    def set_rng(self, rng: Any) -> None:
        """Begin a chain with its generator (PyMC 5)."""
        self.rng = get_random_generator(rng, copy=False)
        self._begin()

    def setup_chain(self, rng: Any, tune: int, draws: int) -> None:
        """Begin a chain (PyMC 6)."""
        self._planned = tune + draws
        self.set_rng(rng)

    def __reduce__(self) -> tuple[Any, ...]:
        kept = {
            name: value
            for name, value in vars(self).items()
            if name not in self._made and not name.endswith("__newargs")
        }
        return _rebuilt, (type(self), kept)


def _rebuilt(cls: type[CompiledStep], state: dict[str, Any]) -> CompiledStep:
    step = object.__new__(cls)
    step.__dict__.update(state)
    step._compile()
    return step


#: Parameters that come first in the signature of a step method.
_FIRST = ("vars", "draws", "tune", "chains")


def full_signature(cls: type, hidden: Collection[str] = ()) -> inspect.Signature:
    """Signature of a step method with the parameters that its ``**kwargs`` stands for. `hidden` are
    parameters of bases that `cls` sets, or refuses.
    """
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        for parameter in parameters:
            variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if not variable and parameter.name not in hidden:
                found.setdefault(parameter.name, parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    first = [found.pop(name) for name in _FIRST if name in found]
    shown = [*first, *found.values()]
    # in the order that Python asks for; those without a default first
    shown.sort(key=lambda p: (p.kind, p.kind < p.KEYWORD_ONLY and p.default is not p.empty))
    return inspect.Signature(shown)


# -- results: InferenceData (PyMC 5) or DataTree (PyMC 6) -----------------------------------------


def quick_gradients() -> dict[str, Any]:
    """Arguments of ``pm.sample``: PyMC 5 interprets gradients where there is no C compiler."""
    return {} if pytensor.config.cxx else {"compile_kwargs": {"mode": "NUMBA"}}


def is_result(found: Any) -> bool:
    """Whether this is a result with groups, as ``pm.sample`` returns it."""
    if PYMC_MAJOR >= 6:
        return isinstance(found, xr.DataTree)
    import arviz as az

    return isinstance(found, xr.DataTree | az.InferenceData)


def group_names(idata: Any) -> list[str]:
    """Names of the groups of a result, nested ones by their path within it."""
    if isinstance(idata, xr.DataTree):
        return [node.relative_to(idata) for node in idata.descendants]
    return list(idata.groups())


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
