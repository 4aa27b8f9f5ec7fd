"""The order of the house: imports point one way, and the pure parts stay pure."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.size import (
    GUARANTEE,
    MODULES,
    behind,
    imports_of,
    lines_of_code,
    sizes,
    with_reading_list,
)

#: From what is released to what leaves.  A module imports from lower layers, or from its own part.
LAYERS = (
    {"errors"},
    {"base"},
    {"privacy.accounting", "privacy.noise"},
    {"privacy.journal", "privacy.subsampled"},
    {"privacy.ledger", "privacy.plan"},
    {"records"},
    {"rows"},
    {"privacy"},
    {"clusters"},
    {"budget"},
    {"kernels", "publication"},
    {"tuning"},
    {"owners"},
    {"steps"},
    {"published", "subsampling"},
    {"audit", "reports", "sampling"},
    {"workflow"},
    {"__init__", "__main__"},
)
#: What an auditor, or a reader of the algorithms, can read without knowing PyMC.
PURE = {
    "audit",
    "base.checks",
    "base.jit",
    "base.matrices",
    "errors",
    "kernels",
    "privacy.account",
    "privacy.accounting",
    "privacy.answer",
    "privacy.journal",
    "privacy.ledger",
    "privacy.meter",
    "privacy.noise",
    "privacy.plan",
    "privacy.queries",
    "privacy.subsampled",
    "publication.noise_aware",
    "rows.joint",
    "rows.linear",
    "rows.loops",
}
FRAMEWORKS = {"arviz", "pymc", "pytensor", "xarray"}


#: Rooms that nothing but the public face imports (`dp.sample` runs `PrivacyAwareGibbs` as well).
GUESTS = {"published", "subsampling", "reports", "audit", "clusters", "owners", "workflow"}
FACE = {"__init__": GUESTS, "__main__": {"owners", "reports"}, "sampling": {"published"}}
#: How plots look, and simulated records.
FACE |= {
    f"workflow.{key}": {"reports"} for key in ("made_up", "rehearsal", "checking", "comparing")
}
#: Both stand for records elsewhere.
FACE |= {key: {"clusters"} for key in ("owners.analyst", "owners.study")}


def room_of(module: str) -> str:
    return module.split(".")[0]


def part_of(module: str) -> str:
    """The room, or the part of it that has a layer of its own."""
    part = ".".join(module.split(".")[:2])
    return part if any(part in layer for layer in LAYERS) else room_of(module)


def test_every_part_of_the_package_has_its_layer() -> None:
    layers = [part for layer in LAYERS for part in layer]
    assert len(layers) == len(set(layers))
    assert {part_of(module) for module in MODULES} <= set(layers)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_guests_are_imported_by_the_public_face_alone(module: str) -> None:
    guests = {room_of(name) for name in imports_of(module)[0]} & GUESTS
    assert guests <= {room_of(module), *FACE.get(module, ())}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_one_way(module: str) -> None:
    rank = {part: k for k, layer in enumerate(LAYERS) for part in layer}
    part = part_of(module)
    wrong = {
        name
        for name in imports_of(module)[0]
        if part_of(name) != part and rank[part_of(name)] >= rank[part]
    }
    assert not wrong, f"{module} imports {sorted(wrong)}, which are not below it"


def test_no_module_imports_itself_by_a_detour() -> None:
    # a package and its own modules see each other by construction
    for module in sorted(MODULES):
        if "." in module or MODULES[module].name != "__init__.py":
            assert module not in behind(module), module


def is_pure(module: str) -> bool:
    """Whether the module, or a part of the house that it belongs to, is to be pure."""
    return any(module == part or module.startswith(f"{part}.") for part in PURE)


@pytest.mark.parametrize("module", sorted(filter(is_pure, MODULES)))
def test_pure_parts_know_no_framework(module: str) -> None:
    for name in {module, *behind(module)}:
        found = imports_of(name)[1] & FRAMEWORKS
        assert not found, f"{module} reaches {sorted(found)} through {name}"


@pytest.mark.parametrize("module", sorted(m for m in MODULES if part_of(m) == "kernels"))
def test_kernels_see_nothing_but_kernels(module: str) -> None:
    """A kernel is handed queries; it could not find a record if it tried."""
    assert {part_of(name) for name in behind(module)} <= {"kernels"}


def test_one_page_adds_noise_to_records() -> None:
    """Nobody else sums contributions, draws noise for them, or looks at what a holder gives."""
    for module in MODULES:
        names = names_imported(module)
        if module != "privacy.answer":
            assert "pymc_dp.privacy.noise.rounded_normal" not in names, module
            assert "pymc_dp.privacy.noise.discrete_laplace" not in names, module
        assert "pymc_dp.privacy.noise.fill" not in names, module
        if module not in ("privacy.answer", "privacy.holder"):
            assert not [name for name in names if ".answer.clip_" in name], module
        if module != "privacy.holder":
            assert "pymc_dp.privacy.answer.answer" not in names, module
        if module not in ("privacy.answer", "privacy.meter"):  # nobody else makes receipts
            text = MODULES[module].read_text(encoding="utf-8")
            assert "Receipt(" not in text.replace("Receipt()", ""), module
        if module != "clusters.shards":
            assert "pymc_dp.privacy.holder.Holder" not in names, module
        if module != "published.making":
            assert "pymc_dp.privacy.holder.Table" not in names, module
        if module != "privacy.holder":
            assert "sum.add(" not in MODULES[module].read_text(encoding="utf-8"), module
        if module != "privacy.holder":
            assert ".blocks(" not in MODULES[module].read_text(encoding="utf-8"), module
        if room_of(module) not in ("privacy", "rows"):
            assert "rows.loops" not in imports_of(module)[0], module


def test_subsampling_has_nothing_to_do_with_privacy() -> None:
    """It asks for a budget in order to refuse it, and neither clips nor charges."""
    private = {"privacy", "steps", "tuning"}
    for module in MODULES:
        if room_of(module) == "subsampling":
            own = imports_of(module)[0]
            assert private.isdisjoint(room_of(name) for name in own), module
            assert "budget" not in own or module == "subsampling.reading", module


def names_imported(module: str) -> set[str]:
    """What a module takes from others by ``from ... import ...``."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    return {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_steps_are_used_by_nothing_below_them() -> None:
    users = {m for m in MODULES if any(part_of(n) == "steps" for n in imports_of(m)[0])}
    above = {"reports", "steps", "sampling", "workflow", "__init__"}
    assert {part_of(user) for user in users} <= above


def test_a_planted_backward_import_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / "noise.py"
    planted.write_text("from pymc_dp.steps import base\nimport pymc as pm\n", encoding="utf-8")
    monkeypatch.setitem(MODULES, "privacy.noise", planted)
    imports_of.cache_clear()
    try:
        with pytest.raises(AssertionError, match="not below it"):
            test_imports_point_one_way("privacy.noise")
        with pytest.raises(AssertionError, match="noise reaches"):
            test_pure_parts_know_no_framework("privacy.noise")
    finally:
        imports_of.cache_clear()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_name_of_a_module_is_bound_twice(module: str) -> None:
    """The second one would be what code above it reads."""
    bound = []
    for node in ast.parse(MODULES[module].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            overloads = [name for name in node.decorator_list if ast.unparse(name) == "overload"]
            bound += [] if overloads else [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name for target in targets for name in ast.walk(target)]
            bound += [name.id for name in names if isinstance(name, ast.Name)]
    assert len(bound) == len(set(bound))


def test_the_guarantee_lists_all_that_decides_epsilon() -> None:
    """If this fails: ``python -m benchmarks.size --write``."""
    page = GUARANTEE.read_text(encoding="utf-8")
    assert page == with_reading_list(page)


def test_the_house_does_not_grow() -> None:
    """What is to be read: these figures go down, never up, but for a new room.

    Up by 400 lines: sweeps of PrivacyAwareGibbs as generated loops, 4 to 5 times as fast;
    normal effects in z where NUTS explores; small budgets, with half the error. Up by 190 more (75
    of them decide epsilon): what cannot be of use is refused before it is paid for, impossible
    outcomes, arguments, checks and comparisons.
    """
    found = sizes()
    assert found["lines"] <= 40_340
    assert found["lines without guests"] <= 25_045
    assert found["files"] <= 128
    assert found["modules at the root"] <= 5
    assert found["files that decide epsilon"] <= 35
    assert found["their lines of code"] <= 7_600
    assert lines_of_code(MODULES["privacy.answer"]) < 300


@pytest.mark.slow
def test_a_default_run_does_not_grow(tmp_path: Path) -> None:
    """Of a logistic regression, preparation included, in a process of its own."""
    file = tmp_path / "size.json"
    command = [sys.executable, "-m", "benchmarks.size", "--json", str(file)]
    subprocess.run(command, check=True, capture_output=True, cwd=GUARANTEE.parents[1])
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["files of a run"] <= 55
    assert found["functions of a run"] <= 725
    assert found["Python calls of an iteration"] <= 255
