"""How much there is to read: of the package, of what decides epsilon, and of one default run.

::

    python -m benchmarks.size --quick
    python -m benchmarks.size --json size.json

Lines of code are those that hold more than comments and docstrings.  Budgets, private answers and
publication decide epsilon, with all that they import.  ``--quick`` leaves out the run.
``--write`` brings the list of these files in ``docs/guarantee.md`` up to date.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "MODULES",
    "behind",
    "decides_epsilon",
    "imports_of",
    "lines_of_code",
    "of_a_run",
    "reading_list",
    "sizes",
    "with_reading_list",
]

PACKAGE = Path(__file__).parents[1] / "pymc_dp"
#: Modules by their names within the package.
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
#: What the core does without.
GUESTS = (
    "published",
    "subsampling",
    "reports",
    "audit",
    "clusters",
    "owners",
    "workflow",
    "__main__",
)
#: Where epsilon is promised, paid for and published.
_PROMISE = ("budget", "privacy", "publication.publish")
#: In which order to read what decides epsilon: what is named first comes first.
_READING = (
    ("privacy.answer", "privacy.noise", "privacy.queries", "privacy.holder", "privacy.meter"),
    ("privacy.journal", "privacy.ledger", "privacy.account"),
    ("privacy.chains", "privacy.preparation"),
    ("privacy", "records", "rows", "budget", "publication", "base", "errors"),
)
#: The list stands between these lines of a page.
_BEGIN, _END = "<!-- files that decide epsilon -->\n", "<!-- end of the list -->\n"
GUARANTEE = PACKAGE.parent / "docs" / "guarantee.md"
_QUIET = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of_code(path: Path) -> int:
    """Lines that are neither empty nor comments nor docstrings."""
    text, code = path.read_text(encoding="utf-8"), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _QUIET and token.type != tokenize.ENDMARKER:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            code.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(code)


@cache
def imports_of(module: str) -> tuple[frozenset[str], frozenset[str]]:
    """Modules of the package, and names of other libraries, that a module imports anywhere."""
    own, foreign = set(), set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import in line {node.lineno}"
            assert node.module is not None
            names = [node.module, *[f"{node.module}.{alias.name}" for alias in node.names]]
        else:
            continue
        for name in names:
            library, _, rest = name.partition(".")
            if library != "pymc_dp":
                foreign.add(library)
            elif rest in MODULES:
                own.add(rest)
    return frozenset(own), frozenset(foreign)


def behind(module: str) -> set[str]:
    """Everything in the package that is imported, directly or not."""
    seen: set[str] = set()
    stack = [module]
    while stack:
        for name in imports_of(stack.pop())[0] - seen:
            seen.add(name)
            stack.append(name)
    return seen


def decides_epsilon() -> list[str]:
    """Modules that budgets, private answers and publication import, directly or not."""
    promise = {m for m in MODULES for part in _PROMISE if m == part or m.startswith(f"{part}.")}
    return sorted(promise.union(*map(behind, promise)))


def reading_list() -> str:
    """What decides epsilon as a table in Markdown: file, lines of code, what is in it."""
    order = [name for line in _READING for name in line]

    def place(module: str) -> tuple[int, str]:
        named = [module == name or module.startswith(f"{name}.") for name in order]
        return named.index(True), module

    rows = ["| File | Lines of code | |", "|---|---:|---|"]
    deciding = decides_epsilon()
    for module in sorted(deciding, key=place):
        path, code = MODULES[module], lines_of_code(MODULES[module])
        if code:
            says = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            what = re.sub(r":mod:`pymc_dp\.([\w.]+)`", r"`\1`", says.splitlines()[0])
            rows.append(f"| `{path.relative_to(PACKAGE)}` | {code} | {what} |")
    others = [m for m in MODULES if m.startswith("rows.") and m not in deciding]
    code = sum(lines_of_code(MODULES[module]) for module in others)
    what = f"The other {len(others)} files, trusted for one thing alone: see above."
    rows.append(f"| `rows/` | {code:,} | {what} |")
    return "\n".join(rows) + "\n"


def with_reading_list(page: str) -> str:
    """The page with its list up to date."""
    before, rest = page.split(_BEGIN)
    return f"{before}{_BEGIN}{reading_list()}{_END}{rest.split(_END)[1]}"


def sizes() -> dict[str, int]:
    """Of the package as it stands."""

    def lines(names: Iterable[str]) -> int:
        return sum(MODULES[name].read_text(encoding="utf-8").count("\n") for name in names)

    private = [name for name in MODULES if name.split(".")[0] not in GUESTS]
    deciding = decides_epsilon()
    return {
        "lines": lines(MODULES),
        "lines without guests": lines(private),
        "files": len(MODULES),
        "modules at the root": len([p for p in PACKAGE.glob("*.py") if p.name != "__init__.py"]),
        "files that decide epsilon": len(deciding),
        "their lines of code": sum(lines_of_code(MODULES[name]) for name in deciding),
    }


def of_a_run() -> dict[str, int]:
    """Of ``dp.sample`` with default arguments on a logistic regression, in this process."""
    import pymc as pm

    import pymc_dp as dp

    rng = np.random.default_rng(0)
    x = rng.normal(size=(5000, 3))
    y = (rng.random(5000) < 1.0 / (1.0 + np.exp(-x @ [1.0, -0.5, 0.3]))).astype(int)
    draws = 100
    with pm.Model():
        pm.Bernoulli("y", logit_p=x @ pm.Normal("b", 0.0, 2.0, shape=3), observed=y)
        dp.PrivacyBudget(4.0, 1e-6)
        options = {"draws": draws, "chains": 1, "cores": 1, "progressbar": False}
        step, entered, _ = _profiled(lambda: dp.DPLangevin(draws=draws, chains=1))
        own_step, calls = step.step, []

        def counted(*args: Any) -> Any:
            result, inside, number = _profiled(lambda: own_step(*args))
            entered.update(inside)
            calls.append(number)
            return result

        step.step = counted
        _, others, _ = _profiled(lambda: dp.sample(step=step, **options))
        entered |= others
    return {
        "files of a run": len({file for file, _ in entered}),
        "functions of a run": len(entered),
        "Python calls of an iteration": int(np.median(calls)),
    }


def _profiled(call: Callable[[], Any]) -> tuple[Any, set[tuple[str, str]], int]:
    """The result, functions of the package that were entered, and how many calls there were."""
    entered, number, before = set[tuple[str, str]](), 0, sys.getprofile()

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal number
        if event == "call":
            number += 1
            code = frame.f_code
            if code.co_filename.startswith(str(PACKAGE)) and not code.co_name.startswith("<"):
                entered.add((code.co_filename, code.co_qualname))

    sys.setprofile(look)
    try:
        return call(), entered, number
    finally:
        sys.setprofile(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="without a run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="the list in docs/guarantee.md")
    given = parser.parse_args()
    if given.write:
        page = GUARANTEE.read_text(encoding="utf-8")
        GUARANTEE.write_text(with_reading_list(page), encoding="utf-8")
        return
    found = sizes() if given.quick else sizes() | of_a_run()
    for name, value in found.items():
        print(f"{value:8,d}  {name}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
