"""Exceptions of the package. Each takes one message, so that it survives PyMC's worker pipes."""

from __future__ import annotations


class PrivacyError(Exception):
    """Base class of all errors raised to protect a guarantee."""


class BudgetExceeded(PrivacyError):
    """The requested work would cost more than what is left of a privacy budget."""


class LedgerError(PrivacyError):
    """A ledger file is missing, damaged, or disagrees with the budget that uses it."""


class _RefusedModel(PrivacyError, ValueError):
    """A model is refused; `nonprivate` is the message where nothing has to be private."""

    def __init__(self, message: str, nonprivate: str | None = None) -> None:
        super().__init__(message)
        self.nonprivate = nonprivate or message


class NotFactorizable(_RefusedModel):
    """The likelihood is not a sum of one term per record, so no sensitivity can be stated."""


class OwnerUnavailable(PrivacyError):
    """An owner of records does not answer, so a run cannot go on."""


class PlanMismatch(PrivacyError, ValueError):
    """``pm.sample`` was called with other draws, tune or chains than the step was planned for."""


class UnsafeModel(_RefusedModel):
    """A budgeted model would be sampled or evaluated in a way that is not private."""


class UnsafeRelease(PrivacyError, ValueError):
    """Something was to be published that did not come from a private mechanism."""
