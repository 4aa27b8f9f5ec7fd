"""A process that has imported what takes long, and tests in forks of itself.

It reads the arguments of one run of pytest a line, as JSON, and answers each with its exit status
and what it said.  The package itself is imported in the fork, so that every run sees it as it is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from typing import NoReturn


def _test(arguments: list[str], longest: int, said: int) -> NoReturn:
    import pytest

    signal.alarm(longest)
    sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(said, stream)
    status = int(pytest.main(arguments))
    sys.stdout.flush()
    os._exit(status)


def main() -> None:
    import multiprocessing.connection  # noqa: F401
    import sqlite3  # noqa: F401

    import arviz  # noqa: F401
    import filelock  # noqa: F401
    import hypothesis  # noqa: F401
    import mpmath  # noqa: F401
    import numba.types  # noqa: F401
    import pymc  # noqa: F401
    import pytest  # noqa: F401

    assert "pymc_dp" not in sys.modules
    sys.path.insert(0, os.getcwd())
    for line in sys.stdin:
        arguments, longest = json.loads(line)
        with tempfile.TemporaryFile() as said:
            fork = os.fork()
            if not fork:
                _test(arguments, longest, said.fileno())
            status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
            said.seek(0)
            print(json.dumps([status, said.read().decode(errors="replace")]), flush=True)


if __name__ == "__main__":
    main()
