"""The parameters of a class whose `__init__` passes keywords on to those of its bases."""

from __future__ import annotations

import inspect
from collections.abc import Collection

_FIRST = ("vars", "draws", "tune", "chains")


def full_signature(cls: type, hidden: Collection[str] = ()) -> inspect.Signature:
    """Signature of a step method with the parameters that its ``**kwargs`` stands for.

    Variables and plan come first, then the class's own parameters, then those of its bases.
    `hidden` are parameters of bases that `cls` sets, or refuses.
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
