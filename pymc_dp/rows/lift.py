"""Structural proof that a log-likelihood factorises over records, and its rebuilding by blocks.

:func:`lift_rows` walks from the per-observation log-probability back to the data, following the
record axis through every operation.  An operation for which there is no rule is refused by name:
the rules are an allow-list.  The walk meets row data, lifted to an input that holds a block of
rows, and shared values, which must not depend on any row (checked at the end).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace

from pymc_dp.errors import NotFactorizable
from pymc_dp.rows.ancestry import (
    ancestors_without_shapes,
    hides_code,
    is_long_constant,
)
from pymc_dp.rows.counts import RowCounts
from pymc_dp.rows.cuts import Cut, RowGraph, RowLeaf
from pymc_dp.rows.lifter import Lifter, describe
from pymc_dp.rows.rules import RULES
from pymc_dp.rows.sizes import counts_rows, fixed_shapes, static_shape


def lift_rows(
    logps: dict[str, Variable],
    parameters: Mapping[Variable, tuple[int, ...]],
    public: Iterable[Variable],
    n_rows: int,
    private_length: int | None = None,
    counts: RowCounts | None = None,
) -> RowGraph:
    """Rebuild per-observation log-likelihoods as the log-likelihood of a block of rows.

    Raises NotFactorizable if a term cannot be shown to depend on its own row only.  The message
    names the observed variable, the operation or array, and a remedy.

    Parameters
    ----------
    logps
        Per-observation log-probability of each observed variable, records on the first axis;
        further axes are summed into the record's term.
    parameters
        The value variables of the free random variables, and their shapes.
    public
        Constants and shared variables declared public: they may reach every record.
    private_length
        Unnamed arrays with this many entries or more may hold records and must not reach every
        record.  Default: `n_rows`.
    counts
        Numbers of rows, where they are private: no term may depend on them.
    """
    public = set(public)
    leaves: dict[Variable, RowLeaf] = {}
    cuts: dict[tuple, Cut] = {}
    conditions: list[Variable] = []
    lookups: list[tuple[Variable, int]] = []
    terms: list[Variable] = []
    for name, logp in logps.items():
        lifter = Lifter(
            parameters,
            public,
            n_rows,
            private_length or n_rows,
            name,
            leaves,
            cuts,
            conditions,
            RULES,
        )
        value = lifter.lift(logp, 0)
        if value.type.ndim > 1:
            value = value.sum(axis=tuple(range(1, value.type.ndim)))
        if not leaves:
            raise NotFactorizable(f"The likelihood of `{name}` does not depend on any data.")
        rows_of_block = next(iter(leaves.values())).block.shape[0]
        designs = [key for key, cut in cuts.items() if cut.row_data is not None]
        value, *columns = clone_replace(
            [
                value,
                *[cuts[key].row_data for key in designs],
                *[label for label, _, _ in lifter.lookups],
            ],
            {lifter.block_rows: rows_of_block},
        )
        for key, column in zip(designs, columns, strict=False):
            cuts[key] = replace(cuts[key], row_data=column)
        for label, (_, indexed, axis) in zip(columns[len(designs) :], lifter.lookups, strict=True):
            lookups.append((label, static_shape(indexed, parameters)[axis]))
        _check_shared(lifter)
        terms.append(value)
    rows = {leaf.block for leaf in leaves.values()} | {cut.eta for cut in cuts.values()}
    phis = [cut.phi for cut in cuts.values()]
    outputs = [
        *terms,
        *[cut.row_data for cut in cuts.values() if cut.row_data is not None],
        *phis,
        *[label for label, _ in lookups],
        *conditions,
    ]
    if counts is not None:
        counted = replace(counts, public={*counts.public, *parameters, *rows}).behind(outputs, phis)
        if counted is not None:
            names = ", ".join(f"`{name}`" for name in logps)
            raise NotFactorizable(counts_rows(f"The likelihood of {names}", counted))
    found = iter(fixed_shapes(outputs, parameters, public, rows))
    terms = [next(found) for _ in terms]
    row_data = [None if cut.row_data is None else next(found) for cut in cuts.values()]
    return RowGraph(
        terms=tuple(terms),
        cuts=tuple(
            replace(cut, row_data=columns, phi=next(found))
            for cut, columns in zip(cuts.values(), row_data, strict=True)
        ),
        leaves=tuple(leaves.values()),
        lookups=tuple((next(found), size) for _, size in lookups),
        conditions=tuple(found),
        n_rows=n_rows,
        names=tuple(logps),
    )


def _check_shared(lifter: Lifter) -> None:
    """Refuse row data, and private arrays of unknown meaning, that reach every record."""
    hidden = hides_code(lifter.shared)
    if hidden is not None:
        raise lifter.refuse(
            f"operation {hidden} reaches every record and may hold data that cannot be seen",
            "Write it with PyTensor operations.",
        )
    for variable in ancestors_without_shapes(lifter.shared):
        if variable in lifter.public or variable.owner is not None:
            continue
        if variable in lifter.leaves:
            raise lifter.refuse(
                f"rows of {describe(variable)} reach other records (for instance through a mean, "
                "a maximum or a standardisation inside the model)",
                "Standardise with public constants, before the model is built.",
                "Standardise with constants, before the model is built.",
            )
        if isinstance(variable, SharedVariable):
            raise lifter.refuse(
                f"pm.Data {describe(variable)} reaches every record",
                f"If it is not private, declare it: PrivacyBudget(public=[{variable.name!r}]).",
                "It has as many entries as there are records, of which a sample takes a part: "
                "compute what is needed of it before the model is built.",
            )
        if is_long_constant(variable, lifter.private_length):
            raise lifter.refuse(
                "a constant array as long as the data reaches other records",
                "Standardise with public constants before the model is built; if the array is "
                "public, pass it as pm.Data and declare it in PrivacyBudget(public=...).",
                "Standardise with constants before the model is built.",
            )
