"""The reference is complete, and docstrings say what signatures do."""

from __future__ import annotations

import dataclasses
import doctest
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import pymc_dp as dp

DOCS = Path(__file__).parents[1] / "docs"
needs_sources = pytest.mark.skipif(not DOCS.is_dir(), reason="installed without its documentation")

SECTION = re.compile(r"^([A-Z][A-Za-z ]+)\n-{3,}$", flags=re.MULTILINE)


def sections(docstring: str) -> dict[str, str]:
    """Sections of a docstring in the NumPy format, by title; "" is what comes before."""
    title, *rest = SECTION.split(docstring)
    return {"": title, **dict(zip(rest[::2], rest[1::2], strict=True))}


def documented(text: str) -> list[str]:
    """Names that a section of parameters describes, in order, without their stars."""
    heads = [line for line in text.splitlines() if line and not line.startswith(" ")]
    names = [name for head in heads for name in head.split(" : ")[0].split(",")]
    return [name.strip().lstrip("*") for name in names]


def accepted(function: Any) -> list[str]:
    """Names of the parameters of a function or class, in order."""
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def public_objects() -> dict[str, Any]:
    """Public functions and classes, and public methods of the latter, by name."""
    found = {name: getattr(dp, name) for name in dp.__all__ if name != "audit"}
    found |= {f"audit.{name}": getattr(dp.audit, name) for name in dp.audit.__all__}
    for cls in list(found.values()):
        for base in cls.__mro__ if inspect.isclass(cls) else ():
            if base.__module__.startswith("pymc_dp"):
                for method, value in vars(base).items():
                    if isinstance(value, classmethod | staticmethod):
                        value = value.__func__
                    if not method.startswith("_") and (
                        inspect.isfunction(value) or isinstance(value, property)
                    ):
                        function = value.fget if isinstance(value, property) else value
                        found.setdefault(function.__qualname__, value)
    return found


OBJECTS = public_objects()
#: Called by PyMC, not by users; described where PyMC defines them.
HOOKS = {"set_rng", "setup_chain", "step", "competence", "stop_tuning", "reset_tuning"}
CALLABLES = {
    name: value
    for name, value in OBJECTS.items()
    if not isinstance(value, property)
    and name.split(".")[-1] not in HOOKS
    and not (inspect.isclass(value) and issubclass(value, Exception))
}
RETURNING = {
    name: value
    for name, value in CALLABLES.items()
    if inspect.isfunction(value)
    and inspect.signature(value).return_annotation not in (None, "None", inspect.Signature.empty)
}


@pytest.mark.parametrize("name", OBJECTS)
def test_public_names_have_a_summary(name: str) -> None:
    docstring = inspect.getdoc(OBJECTS[name])
    assert docstring, f"{name} has no docstring"
    assert docstring.split("\n\n")[0].rstrip().endswith((".", ":", "?")), "one sentence, first"


@pytest.mark.parametrize("name", CALLABLES)
def test_parameters_are_those_of_the_signature(name: str) -> None:
    value = CALLABLES[name]
    found = sections(inspect.getdoc(value) or "")
    # a dataclass describes its fields as attributes
    title = "Attributes" if dataclasses.is_dataclass(value) else "Parameters"
    assert documented(found.get(title, "")) == accepted(value)


@pytest.mark.parametrize("name", RETURNING)
def test_what_is_returned_is_described(name: str) -> None:
    assert "Returns" in sections(inspect.getdoc(RETURNING[name]) or "")


@pytest.mark.parametrize("name", CALLABLES)
def test_errors_that_are_raised_are_described(name: str) -> None:
    """Of the functions whose own body raises; what they call describes its own."""
    value = CALLABLES[name]
    body = value.__init__ if inspect.isclass(value) else value  # type: ignore[misc]
    if not body.__module__.startswith("pymc_dp") or body.__code__.co_filename == "<string>":
        return  # written by dataclasses
    raised = set(re.findall(r"^\s+raise (\w+)\(", inspect.getsource(body), flags=re.MULTILINE))
    described = sections(inspect.getdoc(value) or "").get("Raises", "")
    assert not [error for error in raised if error not in described]


@pytest.mark.parametrize(
    "name",
    [name for name in CALLABLES if "Examples" in sections(inspect.getdoc(OBJECTS[name]) or "")],
)
def test_examples_run(name: str) -> None:
    if name == "compare_accountants":
        pytest.importorskip("dp_accounting")
    found = doctest.DocTestFinder(recurse=False).find(OBJECTS[name], name, globs={})
    examples = [example for test in found for example in test.examples]
    assert examples
    for example in examples:  # those of a posterior or a budget are not run
        compile(example.source, name, "single")
    assert sum(doctest.DocTestRunner().run(test).failed for test in found) == 0


def test_the_parser_finds_what_is_wrong() -> None:
    text = "Summary.\n\nParameters\n----------\na, b : int\n    Both.\n**kwargs\n    More.\n"
    assert documented(sections(text)["Parameters"]) == ["a", "b", "kwargs"]


@needs_sources
def test_every_public_name_has_an_entry_in_the_reference() -> None:
    listed: dict[str, list[str]] = {}
    for page in (DOCS / "api").glob("*.rst"):
        text = page.read_text(encoding="utf-8")
        module = re.search(r"currentmodule:: (\S+)", text)
        for block in re.findall(r"autosummary::\n(?:   :.*\n)+\n((?:   \S+\n)+)", text):
            assert module is not None
            listed.setdefault(module.group(1), []).extend(block.split())
    assert sorted(listed["pymc_dp"]) == sorted({*dp.__all__} - {"audit"})
    assert sorted(listed["pymc_dp.audit"]) == sorted(dp.audit.__all__)


@needs_sources
def test_every_page_is_reached_from_another() -> None:
    """Of those that the reference, or a glob, does not list."""
    texts = {page: page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")}
    for page in texts:
        if "_build" in page.parts or page.stem == "index" or page.parent.name == "tutorials":
            continue
        others = "".join(text for other, text in texts.items() if other != page)
        assert re.search(rf"\b{page.stem}\b", others), f"{page.name} is linked from nowhere"


@needs_sources
def test_files_and_names_that_pages_point_at_exist() -> None:
    """``privacy/answer.py``, and ``privacy/meter.py`, `pay``: a function or class of that file."""
    package = Path(dp.__file__).parent
    for page in DOCS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for file, name in re.findall(r"`(\w+/\w+\.py)`(?:, `(?:\w+\.)?(\w+)`)?", text):
            if (DOCS.parent / file).exists():
                continue
            code = (package / file).read_text(encoding="utf-8")
            assert not name or re.search(rf"(def|class) {name}\b", code), f"{page.name}: {name}"


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_sources
def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    links = load(DOCS / "check_links.py")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.html").write_text('<h1 id="here"></h1><a href="../a.html">back</a>')
    page = '<a href="sub/b.html#here"></a><a href="https://example.org/x"></a><a href="#top"></a>'
    (tmp_path / "a.html").write_text(f'<p id="top"></p>{page}')
    assert links.broken_links(tmp_path) == []
    (tmp_path / "a.html").write_text('<a href="sub/b.html#gone"></a><img src="c.png">')
    assert links.broken_links(tmp_path) == [("a.html", "c.png"), ("a.html", "sub/b.html#gone")]


@needs_sources
def test_number_of_draws_of_the_tutorials(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = load(DOCS / "tutorials" / "_draws.py").draws
    monkeypatch.delenv("PYMC_DP_DOCS_DRAWS", raising=False)
    assert draws(1000, 200) == 200
    monkeypatch.setenv("PYMC_DP_DOCS_DRAWS", "full")
    assert draws(1000, 200) == 1000
    monkeypatch.setenv("PYMC_DP_DOCS_DRAWS", "many")
    with pytest.raises(ValueError, match="many"):
        draws(1000, 200)


@needs_sources
def test_cards_of_the_tutorials() -> None:
    summary = load(DOCS / "_ext" / "summary.py").summary
    hidden = "---\nkernelspec: x\n---\n\n```{code-cell}\n# not this\n```\n\n"
    assert summary(f"{hidden}# Title\n\nTwo\nlines. Three.\n\nMore.") == ("Title", "Two lines.")


def test_classes_derived_from_a_step_can_take_any_parameters() -> None:
    class Positional(dp.DPLangevin):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)

    class Further(dp.DPLangevin):
        def __init__(self, extra: int, **kwargs: object) -> None:
            super().__init__(**kwargs)

    assert list(inspect.signature(Positional).parameters)[:2] == ["vars", "draws"]
    assert "extra" in inspect.signature(Further).parameters
