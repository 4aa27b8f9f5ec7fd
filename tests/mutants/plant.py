"""Plant faults in copies of the package, and see whether the tests named for them fail.

``python -m tests.mutants.plant`` plants all of them and says how many survive; words after it
choose faults that have one of them in their name.  The faults are in ``faults.txt``.
"""

from __future__ import annotations

import compileall
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pymc_dp"
#: Seconds for the tests of one fault, compilation included; and for those of all.
_LONGEST, _LONGEST_OF_ALL = 600, 1800


@dataclass(frozen=True)
class Fault:
    """A change of one file, and the tests of which one must fail."""

    file: str
    what: str
    tests: tuple[str, ...]
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"

    def planted(self, text: str) -> str:
        """The text of the file with the fault."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self}: stands {text.count(self.old)} times in the file, not once")
        return text.replace(self.old, self.new)


def read_faults() -> list[Fault]:
    """The table; its form is told at its beginning."""
    faults, file = [], ""
    text = (Path(__file__).parent / "faults.txt").read_text(encoding="utf-8")
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        if len(lines) == 1:
            [file] = lines
        elif lines:
            of = {mark: [x[2:] for x in lines if x[:1] == mark] for mark in "=?-+"}
            assert len(lines) == sum(map(len, of.values())), block
            old, new = "\n".join(of["-"]), "\n".join(of["+"])
            tests = tuple(f"tests/{name}" for name in " ".join(of["?"]).split())
            faults.append(Fault(file, " ".join(of["="]), tests, old, new))
    return faults


class Copies:
    """Copies of package and tests, in which one process at a time plants and tests."""

    def __init__(self, folder: Path, number: int) -> None:
        # what is compiled is kept under a digest of its sources: of the faults before, too
        environment = os.environ | {
            "PYTHONDONTWRITEBYTECODE": "1",
            "NUMBA_CACHE_DIR": str(folder / "numba"),
            "NUMBA_DISABLE_INTEL_SVML": "1",
            "PYTENSOR_FLAGS": f"cxx=,traceback__limit=0,base_compiledir={folder / 'pytensor'}",
            "OMP_NUM_THREADS": "1",
        }
        self._hosts: list[subprocess.Popen[str]] = []
        self._free: SimpleQueue[tuple[Path, subprocess.Popen[str]]] = SimpleQueue()
        for k in range(number):
            copy, ignored = folder / f"copy{k}", shutil.ignore_patterns("__pycache__")
            for name in ("pymc_dp", "tests"):
                shutil.copytree(ROOT / name, copy / name, ignore=ignored)
            shutil.copy(ROOT / "pyproject.toml", copy)
            # checked by its hash: a fault may be as long as what it replaces, in the same second
            mode = py_compile.PycInvalidationMode.CHECKED_HASH
            compileall.compile_dir(copy / "pymc_dp", quiet=1, invalidation_mode=mode)
            host = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "host.py")],
                cwd=copy,
                env={k: v for k, v in environment.items() if not k.startswith("PYTEST_")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._hosts.append(host)
            self._free.put((copy, host))

    def close(self) -> None:
        """End the processes that test."""
        for host in self._hosts:
            host.kill()
            host.communicate()

    @contextmanager
    def _one(self) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
        taken = self._free.get()
        try:
            yield taken
        finally:
            self._free.put(taken)

    @staticmethod
    def _passes(
        host: subprocess.Popen[str], tests: Iterable[str], longest: int
    ) -> tuple[bool, str]:
        """Whether the tests pass; they may fail, but not be missing or impossible to collect."""
        assert host.stdin is not None and host.stdout is not None
        arguments = ["-x", "-q", "-p", "no:cacheprovider", *tests]
        host.stdin.write(json.dumps([arguments, longest]) + "\n")
        host.stdin.flush()
        status, said = json.loads(host.stdout.readline() or '[-1, "The host is gone."]')
        if status not in (0, 1):
            raise AssertionError(f"The tests could not be run ({status}).\n{said}")
        return status == 0, said

    def survives(self, fault: Fault) -> bool:
        """Whether all tests named for a fault pass with it."""
        with self._one() as (copy, host):
            path = copy / "pymc_dp" / fault.file
            text = path.read_text(encoding="utf-8")
            path.write_text(fault.planted(text), encoding="utf-8")
            try:
                return self._passes(host, fault.tests, _LONGEST)[0]
            finally:
                path.write_text(text, encoding="utf-8")

    def without_fault(self, faults: Sequence[Fault]) -> str:
        """What pytest says of all their tests without a fault, if some fail; else nothing."""
        with self._one() as (_, host):
            tests = sorted({test for fault in faults for test in fault.tests})
            passed, said = self._passes(host, tests, _LONGEST_OF_ALL)
            return "" if passed else said


@contextmanager
def planting(faults: Sequence[Fault]) -> Iterator[tuple[Callable[[], str], list[Future[bool]]]]:
    """Test each fault, two at a time; yields how to test without one, and what will be found."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        copies = Copies(Path(folder), 2)
        found = [pool.submit(copies.survives, fault) for fault in faults]
        try:
            yield lambda: copies.without_fault(faults), found
        finally:
            pool.shutdown(cancel_futures=True)
            copies.close()


def main(words: Sequence[str]) -> int:
    """Plant, and print what survives; the number of survivors and of failures to find out."""
    faults = [f for f in read_faults() if not words or any(word in str(f) for word in words)]
    wrong = 0
    with planting(faults) as (without, found):
        for fault, future in zip(faults, found, strict=True):
            try:
                said = "SURVIVES" if future.result() else "caught"
            except Exception as error:
                said = f"UNKNOWN: {error}"
            wrong += said != "caught"
            print(f"{fault}: {said}", flush=True)
        if said := without():
            print(f"THE TESTS FAIL WITHOUT A FAULT\n{said}")
            wrong += 1
    print(f"{len(faults)} faults, {wrong} not caught")
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 100))
