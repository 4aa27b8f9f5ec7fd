"""Numba compilation with a disk cache wherever there is a place for one, which is never stale.

Numba's own cache checks only the file of the called function, not others whose code or constants
were compiled in. Here the directory is named by a digest of every file that code can come from.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

# Intel's vector library rounds exp and log differently from the scalar code at the end of a block;
# a record would not give the same bits wherever it stands. Read when numba is first imported.
os.environ.setdefault("NUMBA_DISABLE_INTEL_SVML", "1")

import llvmlite
import numba
from numba import njit
from numba.core.caching import CompileResultCacheImpl, _CacheLocator

if getattr(numba.config, "USING_SVML", False):
    warnings.warn(
        "numba was imported before pymc_dp and uses Intel's vector mathematics, with which a "
        "record may be rounded differently according to its place. Set NUMBA_DISABLE_INTEL_SVML=1 "
        "before Python starts: without it, guarantees for users with several rows and for "
        "neighboring='add_or_remove_one' hold up to rounding only.",
        UserWarning,
        stacklevel=2,
    )

F = TypeVar("F", bound=Callable[..., Any])

_ROOT = Path(__file__).parents[1]
_IMPORT = re.compile(
    r"^ *(?:from (pymc_dp[\w.]*) import (\([^)]*\)|.*)|import (pymc_dp[\w.]*))", re.MULTILINE
)
#: Seconds after which code compiled from other sources is discarded: another process may use it.
_KEPT = 86_400.0


def sources() -> dict[str, str]:
    """Texts of the modules that compile functions, and of all that they import, by name."""
    texts = {}
    for path in _ROOT.rglob("*.py"):
        parts = ("pymc_dp", *path.relative_to(_ROOT).with_suffix("").parts)
        texts[".".join(parts).removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    waiting = [name for name, text in texts.items() if "base.jit" in text or "numba" in text]
    found: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if name in texts and name not in found:
            found[name] = texts[name]
            for module, names, plain in _IMPORT.findall(texts[name]):
                waiting += [module or plain, *[f"{module}.{n}" for n in re.findall(r"\w+", names)]]
    return found


def _digest() -> str:
    """Digest of the sources and settings, beyond what Numba's cache checks by itself. Without
    sources (in an archive, say) no code of another process is ever read.
    """
    found = sorted(sources().items()) or uuid4()
    mathematics = getattr(numba.config, "USING_SVML", False)
    text = repr((found, llvmlite.__version__, numba.config.BOUNDSCHECK, mathematics))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


#: Changes whenever compiled code may change.
DIGEST = _digest()


class _Locator(_CacheLocator):
    """Numba's place for the code of a function of this package, in a directory of the digest."""

    usual = tuple(CompileResultCacheImpl._locator_classes)

    def __init__(self, found: _CacheLocator, py_file: str) -> None:
        self._found, self._py_file = found, py_file

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator | None:
        if _ROOT not in Path(py_file).parents:
            return None
        places = (kind.from_function(py_func, py_file) for kind in cls.usual)
        return next((cls(place, py_file) for place in places if place is not None), None)

    def get_cache_path(self) -> str:
        return os.path.join(self._found.get_cache_path(), f"pymc_dp-{DIGEST}")

    def get_source_stamp(self) -> str:
        return DIGEST

    def get_disambiguator(self) -> str:
        return self._found.get_disambiguator()

    def ensure_cache_path(self) -> None:
        own = Path(self.get_cache_path())
        if not own.exists():
            for other in own.parent.glob("pymc_dp-*"):
                with suppress(OSError):
                    if other.stat().st_mtime < time.time() - _KEPT:
                        shutil.rmtree(other)
        super().ensure_cache_path()


# PyTensor says in the same way where code is kept; functions of other packages are left alone.
CompileResultCacheImpl._locator_classes.insert(0, _Locator)


def compiled(**options: Any) -> Callable[[F], F]:
    """``numba.njit(cache=True, nogil=True, **options)``, uncached where nothing can be written.
    There ``cache=True`` would raise at import. Threads may run the code side by side. Locators
    named in ``NUMBA_CACHE_LOCATOR_CLASSES`` do not know the digest.
    """
    cache = not getattr(numba.config, "CACHE_LOCATOR_CLASSES", "")

    def decorate(function: F) -> F:
        try:
            return njit(cache=cache, nogil=True, no_cfunc_wrapper=True, **options)(function)
        except RuntimeError:
            return njit(nogil=True, no_cfunc_wrapper=True, **options)(function)

    return decorate
