"""What the two step methods for published statistics share."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from pymc.step_methods.compound import BlockedStep, Competence, StepMethodState
from pymc.step_methods.state import dataclass_state

__all__ = ["CompiledStep"]


@dataclass_state
class CompiledStepState(StepMethodState):
    """Nothing of its own: all that moves are variables of the model."""


class CompiledStep(BlockedStep):
    """A step method whose compiled functions are made again where a copy arrives."""

    default_blocked = True
    _state_class = CompiledStepState
    #: Attributes that :meth:`_compile` makes, and that are never pickled.
    _made: tuple[str, ...] = ()

    @abstractmethod
    def _compile(self) -> None:
        """Make what is compiled, and begin a chain."""

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
