"""What step methods share that are not private and hold compiled functions."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from pymc.step_methods.compound import BlockedStep, Competence, StepMethodState
from pymc.step_methods.state import dataclass_state
from pymc.util import get_random_generator


@dataclass_state
class CompiledStepState(StepMethodState):
    """Nothing of its own: all that moves are variables of the model."""


class CompiledStep(BlockedStep):
    """A step method whose compiled functions are made again where a copy arrives."""

    default_blocked = True
    _state_class = CompiledStepState
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

    def set_rng(self, rng: Any) -> None:
        """Begin a chain with its generator (PyMC 5)."""
        self.rng = get_random_generator(rng, copy=False)
        self._begin()

    def setup_chain(self, rng: Any, tune: int, draws: int) -> None:
        """Begin a chain (PyMC 6)."""
        self._planned = tune + draws
        self.set_rng(rng)

    @staticmethod
    def competence(var: Any, has_grad: bool = False) -> Competence:
        """Never chosen automatically: the user says which variables it moves."""
        return Competence.INCOMPATIBLE

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
