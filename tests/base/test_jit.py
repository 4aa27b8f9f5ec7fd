"""Compiled code is never stale: an edit of anything that it is made of is seen."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from numba.core.dispatcher import Dispatcher

from benchmarks.size import MODULES, imports_of
from pymc_dp.base import jit as _jit
from pymc_dp.rows import loops

#: A caller in one file whose callees are in others, and a function of PyTensor that calls ours.
CALLERS = """
import json
import numpy as np
import pytensor.tensor as pt
from pymc_dp.privacy.answer import clip_linear
from pymc_dp.rows.functions import compile_function
from pymc_dp.rows.linear import LinearRows
from pymc_dp.rows.linear import Moves
from pymc_dp.rows.functions import _RowsTimes

one, nobody = np.ones(1), np.empty((0, 1))
moves = Moves(np.array([0]), np.ones((1, 1)), nobody.astype(int), nobody, one)
rows = LinearRows(0, 100.0 * one, one, 0.0 * one, np.empty(0), moves)
clipped, part = np.zeros(1, dtype=np.int64), np.array([0, 1])
clip_linear(rows, np.zeros(1), part, 1.0, 10.0, clipped, np.empty((2, 1)))

x = pt.matrix()
product = compile_function([x], _RowsTimes()(x, np.array([[2.0]])))
found = {"clipped": int(clipped[0]), "product": float(product(np.array([[3.0]]))[0, 0])}
compiled = [*clip_linear.stats.cache_misses, *product.vm.jit_fn.stats.cache_misses]
print(json.dumps(found | {"compiled": len(compiled)}))
"""
#: What the callees do, and what they do when they were edited.
EDITS = {
    "privacy/answer.py": ("else bound / norm", "else 3.0 * bound / norm"),
    "rows/loops.py": ("out[i] += x[i] * w", "out[i] -= x[i] * w"),
}


def found_in(folder: Path) -> dict[str, Any]:
    """What a fresh process computes with the package in `folder`."""
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(folder / "numba"),
        "PYTENSOR_FLAGS": f"cxx=,base_compiledir={folder / 'pytensor'}",
        "PYTHONDONTWRITEBYTECODE": "1",  # Python would not see an edit within a second
    }
    done = subprocess.run(
        [sys.executable, "-c", CALLERS],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_an_edit_of_what_compiled_code_calls_is_seen_with_a_warm_cache(tmp_path: Path) -> None:
    """A clip edited to three times its bound, in a file that its caller does not know, is used.

    And what was not edited is not compiled again.
    """
    package = tmp_path / "pymc_dp"
    shutil.copytree(
        Path(_jit.__file__).parents[1], package, ignore=shutil.ignore_patterns("__pycache__")
    )
    (package / "__init__.py").write_text("")  # what else the package imports is not needed
    right = {"clipped": 10, "product": 6.0}
    assert found_in(tmp_path) == right | {"compiled": 2}
    assert found_in(tmp_path) == right | {"compiled": 0}
    for name, (old, new) in EDITS.items():
        text = (package / name).read_text(encoding="utf-8")
        assert old in text, name
        (package / name).write_text(text.replace(old, new), encoding="utf-8")
    assert found_in(tmp_path) == {"clipped": 30, "product": -6.0, "compiled": 2}


def test_the_digest_covers_all_that_compiled_code_is_made_of() -> None:
    """Files with compiled functions, and files whose functions or constants they may use."""
    sources = {name.removeprefix("pymc_dp.") for name in _jit.sources()}
    for module, path in MODULES.items():
        names = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
        if names & {"compiled", "njit", "cfunc", "overload", "intrinsic", "numba_njit"}:
            assert module in sources or module == "published.reading", module
    for module in sources:
        assert imports_of(module)[0] <= sources, module


def test_all_cached_code_lies_under_the_digest() -> None:
    functions = {
        id(value): value
        for name, module in list(sys.modules.items())
        if name.startswith("pymc_dp.")
        for value in vars(module).values()
        if isinstance(value, Dispatcher) and value.__module__.startswith("pymc_dp.")
    }
    assert len(functions) > 50
    for function in functions.values():
        path = function.stats.cache_path
        # what is compiled for the density of one model is not kept
        kept = path is not None or function.__module__ != "pymc_dp.published.proposals"
        assert not kept or _jit.DIGEST in str(path), function


def test_code_of_older_sources_is_discarded_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may still use what is younger."""
    monkeypatch.setattr(_jit.numba.config, "CACHE_DIR", str(tmp_path))
    locator = _jit._Locator.from_function(loops.combine.py_func, loops.__file__)
    assert locator is not None
    own = Path(locator.get_cache_path())
    for name, days in {"pymc_dp-old": 2.0, "pymc_dp-younger": 0.5, "others": 2.0}.items():
        folder, then = own.parent / name, time.time() - days * 86_400.0
        folder.mkdir()
        os.utime(folder, (then, then))
    locator.ensure_cache_path()
    kept = {folder.name for folder in own.parent.iterdir()}
    assert kept == {own.name, "pymc_dp-younger", "others"}


@pytest.mark.parametrize("why", ["no place can be written", "locators of others"])
def test_what_cannot_be_cached_rightly_is_compiled_uncached(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "locators of others":
        monkeypatch.setattr(
            _jit.numba.config, "CACHE_LOCATOR_CLASSES", "InTreeCacheLocator", raising=False
        )
    else:
        monkeypatch.setattr(_jit.CompileResultCacheImpl, "_locator_classes", [])

    @_jit.compiled()
    def doubled(x: float) -> float:
        return 2.0 * x

    assert doubled(3.0) == 6.0
    assert doubled.stats.cache_path is None
