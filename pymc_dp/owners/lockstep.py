"""Chains of several processes that ask owners together: one message a round."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

import numpy as np

#: Seconds for which a round waits for chains that have not asked yet.
_PATIENCE = 0.2

Ask = Callable[[int, Sequence[dict[str, Any]]], list[Any]]


class Lockstep:
    """Gathers questions of chains in other processes, and has them asked by this one.

    `ask` takes a plan and a question of each chain, and gives an answer, or an error, to each.  The
    owners are reached from this process alone: connections do not survive a fork.
    """

    def __init__(self, ask: Ask, begin: Callable[[int], int]) -> None:
        self._ask, self._begin = ask, begin
        self.key = os.urandom(32)
        self._listener = connection.Listener(authkey=self.key)
        self.address = self._listener.address
        self._idle: list[connection.Connection] = []
        self._ended = False
        for work in (self._accept, self._serve):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        """Serve no more."""
        self._ended = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._ended:
            try:
                self._idle.append(self._listener.accept())
            except (OSError, EOFError, connection.AuthenticationError):  # type: ignore[attr-defined]
                continue

    def _serve(self) -> None:
        waiting: dict[connection.Connection, tuple[int, dict[str, Any]]] = {}
        first = 0.0
        while not self._ended:
            ready = connection.wait(list(self._idle), timeout=0.02)
            for line in ready:
                assert isinstance(line, connection.Connection)
                try:
                    plan_id, question = line.recv()
                    if question is None:
                        line.send(self._begin(plan_id))
                        continue
                except (EOFError, OSError):  # the chain has ended
                    self._idle.remove(line)
                    continue
                first = first if waiting else time.monotonic()
                waiting[line] = plan_id, question
                self._idle.remove(line)
            if waiting and (not self._idle or time.monotonic() - first > _PATIENCE):
                self._round(waiting)
                waiting = {}

    def _round(self, waiting: dict[connection.Connection, tuple[int, dict[str, Any]]]) -> None:
        for plan_id in {plan_id for plan_id, _ in waiting.values()}:
            lines = [line for line, (of, _) in waiting.items() if of == plan_id]
            try:
                answers = self._ask(plan_id, [waiting[line][1] for line in lines])
            except Exception as error:
                answers = [error] * len(lines)
            for line, answer in zip(lines, answers, strict=True):
                self._idle.append(line)
                try:
                    line.send(answer)
                except (OSError, ValueError):
                    self._idle.remove(line)


class Line:
    """The way of one process to the one that reaches the owners."""

    def __init__(self, address: Any, key: bytes) -> None:
        self._line = connection.Client(address, authkey=key)

    def begin(self, plan_id: int) -> int:
        """Number of a new chain of a plan."""
        self._line.send((plan_id, None))
        return int(self._line.recv())

    def ask(self, plan_id: int, question: dict[str, Any]) -> np.ndarray:
        """The sum of the answers of all owners."""
        self._line.send((plan_id, question))
        found = self._line.recv()
        if isinstance(found, Exception):
            raise found
        return np.asarray(found)
