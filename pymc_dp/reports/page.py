"""One page of HTML about a release: what it promises, how it was made, how it can be checked."""

from __future__ import annotations

import base64
import io
import os
import platform
import re
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from pymc.model import Model

from pymc_dp.base import compat as _compat
from pymc_dp.base.checks import counted
from pymc_dp.publication.publish import privacy_statement, statement_facts
from pymc_dp.reports.budgets import parts_of_statement, plot_budget
from pymc_dp.reports.diagnostics import entries

_MOST, _LONG = 500, 200  # rows of the table of parameters; characters of a setting
_GROUPS = ("posterior", "posterior_raw", "sample_stats")
#: Settings that a reader may know; `pymc_dp.statement_facts` has all of them.
_SETTINGS = ("sampler", "form", "chains", "draws", "tune", "proposal", "step_size", "batch_size")
_OF_DRAWS = ("chain", "draw", "estimate")
#: Sentences of a statement that warn begin in capitals, as names of owners may.
_WARNS = re.compile(
    "(?!.*: these posterior draws)([A-Z]{2,} [A-Z]{2,}|UNRELIABLE|Intervals do NOT)"
)
_STYLE = """
:root { color-scheme: light }
body { margin: 0 auto; padding: 1rem 1.25rem 3rem; max-width: 60rem; background: #fff;
  color: #1a1a1a; font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.6rem; line-height: 1.25 }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; border-top: 1px solid #bbb; padding-top: 1rem }
div { overflow-x: auto }
table { border-collapse: collapse; margin: 0 0 1rem; font-size: .9rem; overflow-wrap: normal }
caption { text-align: left; font-weight: 600; padding: .25rem 0 }
th, td { text-align: left; vertical-align: top; padding: .25rem 1rem .25rem 0;
  border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums }
img { max-width: 100%; height: auto }
.warning { border-left: 4px solid #b00020; padding-left: .75rem; font-weight: 600 }
@media print { body { max-width: none; padding: 0; font-size: 10pt } div { overflow: visible }
  tr, img { break-inside: avoid } h2, caption { break-after: avoid } }
"""
#: A browser loads nothing and runs nothing, whatever a label says.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def report(
    released: Any,
    path: str | os.PathLike[str],
    *,
    model: Model | None = None,
    title: str | None = None,
) -> Path:
    """Write a record of a release: one page of HTML that stands alone.

    Parameters
    ----------
    released : arviz.InferenceData, xarray.DataTree or xarray.Dataset
        From :func:`pymc_dp.sample`, :func:`release`, :func:`laplace` or :func:`find_MAP`, or read
        back from a file.
    path : str or os.PathLike
        The file to write, such as ``"report.html"``; one that exists is replaced.
    model : pymc.Model, optional
        The model of the release, to list its variables.  Default: they are not listed.
    title : str, optional
        Default: "Private posterior", and the label of the data.

    Returns
    -------
    pathlib.Path
        The file.

    Raises
    ------
    UnsafeRelease
        If the result was not released.
    ValueError
        If `path` is a folder or cannot be written, or `model` is not that of the release.

    Notes
    -----
    The page holds the privacy statement, what was charged for what, a summary of the posterior and
    the chains, settings and versions, and how to check the ledger.  It is made from the released
    result alone, and may be published with it.  Of `model` it shows the names of variables,
    distributions and dims, but no number; shapes are those of the released draws.  It has no date,
    as the ledger has none, and loads nothing from the network.

    Examples
    --------
    >>> dp.report(released, "report.html", model=model)  # doctest: +SKIP
    """
    facts, statement = statement_facts(released), privacy_statement(released)
    if not isinstance(path, str | os.PathLike) or Path(path).is_dir():
        raise ValueError(f"path must be a file to write, such as 'report.html', not {path!r}.")
    if model is not None and not isinstance(model, Model):
        raise ValueError(f"model must be a PyMC model, not {type(model).__name__}.")
    if title is None:
        title = "Private posterior" + (f" of {facts['dataset']}" if facts["dataset"] else "")
    groups = _groups(released)
    summary = _summary(groups)
    sections = {
        "Privacy statement": _paragraphs(statement),
        "Guarantee": _guarantee(facts),
        "Charges": _charges(released, facts),
        "Posterior": _posterior(summary),
        "Diagnostics": _diagnostics(groups, summary, statement),
        "Model": "" if model is None else _variables(model, groups["posterior"], facts),
        "Settings and versions": _settings(released, facts),
        "For the data steward": _checks(facts),
    }
    body = "".join(
        f"<section><h2>{heading}</h2>{text}</section>\n"
        for heading, text in sections.items()
        if text
    )
    file, title = Path(path), escape(str(title))
    try:
        file.write_text(
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{title}</title><style>{_STYLE}</style></head>\n"
            f"<body><main><h1>{title}</h1>\n{body}</main></body></html>\n",
            encoding="utf-8",
        )
    except OSError as error:
        raise ValueError(f"path {str(file)!r} cannot be written: {error.strerror}.") from None
    return file


def _groups(released: Any) -> dict[str, xr.Dataset]:
    """What is read of a result."""
    if isinstance(released, xr.Dataset):
        return {"posterior": released}
    names = [name for name in _GROUPS if name in _compat.group_names(released)]
    if "posterior" not in names:
        raise ValueError("released has no group posterior: pass what dp.release returned.")
    return {name: _compat.group(released, name) for name in names}


# -- sections -------------------------------------------------------------------------------------


def _paragraphs(statement: str) -> str:
    kinds = {False: "<p>", True: '<p class="warning">'}
    return "".join(
        f"{kinds[bool(_warnings_in(line))]}{escape(line.strip())}</p>"
        for line in statement.splitlines()
    )


def _warnings_in(text: str) -> list[str]:
    return [sentence for sentence in re.split(r"(?<=\.)\s+", text) if _WARNS.match(sentence)]


def _guarantee(facts: dict[str, Any]) -> str:
    """A table of each promise: one, or that of each owner."""
    tables = []
    for promise in facts.get("owners", [facts]):
        spent, mu, unit = promise["spent"], promise["gdp_mu"], promise["privacy_unit"]
        change = "replaced" if promise["neighboring"] == "replace_one" else "added or removed"
        rows = [
            ("Epsilon", f"{promise['epsilon']:g}"),
            ("Delta", f"{promise['delta']:g}"),
            ("Mu of Gaussian differential privacy", f"{mu:.4g}" if mu else "none: secret batches"),
            ("Neighbouring data sets", f"one {unit} is {change} ({promise['neighboring']})"),
            ("Privacy unit", unit),
            ("Number of units, n", f"{promise['n_units']:,}" if promise["n_units"] else "private"),
            ("Data set", promise["dataset"] or "no label"),
            ("Charged, as epsilon", _number(spent["epsilon"] if promise is facts else spent)),
        ]
        if facts["privacy_guarantee"] == "none":
            rows = [("Guarantee", "NONE: made with insecure test noise")]
        name = f"What {promise['name']} promises" if "name" in promise else "What is promised"
        tables.append(_table(name, rows))
    return "".join(tables)


def _charges(released: Any, facts: dict[str, Any]) -> str:
    """A table of mechanisms, and the picture of a budget; several owners have a budget each."""
    made, planned = facts["draws"] + facts["tune"], facts["mechanisms"]
    parts: list[Any] = [(facts["sampler"], name, None) for name in planned]
    if number := facts["preparation"]["releases"]:
        parts.insert(0, ("preparation", f"{number} releases before", None))
    if alone := "owners" not in facts:
        parts = list(parts_of_statement(facts))
    rows = []
    for who, what, share in parts:
        of = planned.get(what) if who == facts["sampler"] else None
        number = facts["chains"] * (of["at_start"] + made * of["per_iteration"]) if of else 0
        noise = (f"{number:,}", _number(of["noise_multiplier"])) if of else ("", "")
        rows.append([who, what, *noise, "" if share is None else f"{share:.1%}"])
    whole = "together" if alone else "together, at most for an owner"
    rows.append([whole, f"epsilon = {facts['spent']['epsilon']:.4g}", "", "", ""])
    head = ["By", "For", "Releases planned", "Noise multiplier", "Share of the budget, squared mu"]
    table = _table("What was charged, by mechanism", rows, head)
    if not (alone and parts):
        return table
    said = "; ".join(f"{who}, {what}: {share:.1%}" for who, what, share in parts)
    alt = escape(f"Bars, end to end, of the shares of the budget. {said}.")
    return f'{table}<p><img src="{_picture(released)}" alt="{alt}"></p>'


def _picture(released: Any) -> str:
    """The plot of the budget as an address that holds all of it, for a narrow screen."""
    from matplotlib import pyplot as plt

    file = io.BytesIO()
    with plt.style.context(["default", {"svg.hashsalt": "pymc_dp"}]):
        figure: Any = plot_budget(released).figure
        figure.set_size_inches(4.8, figure.get_figheight())
        figure.savefig(file, format="svg", metadata={"Date": None})
        plt.close(figure)
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def _summary(groups: dict[str, xr.Dataset]) -> pd.DataFrame:
    """A row for each scalar: what ArviZ says, or the mode and its standard deviation."""
    import arviz as az

    posterior = groups["posterior"]
    if "estimate" in posterior.dims:
        arrays = [x.transpose("estimate", ...).expand_dims("chain") for x in posterior.values()]
        rows = {name: x[0] for array in arrays for name, x in entries(array)}
        names = [str(name) for name in posterior["estimate"].values]
        return pd.DataFrame.from_dict(rows, orient="index", columns=names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = az.summary(posterior, kind="stats", round_to="none")
        if posterior.sizes["draw"] < 4:  # ArviZ has no answer
            return found
        raw = groups.get("posterior_raw", posterior)  # noise-aware draws are no Markov chain
        return found.join(az.summary(raw, kind="diagnostics", round_to="none"))


def _posterior(summary: pd.DataFrame) -> str:
    caption, shown = "Summary of the draws", summary.iloc[:_MOST]
    if len(summary) > _MOST:
        caption += f", the first {_MOST} of {len(summary):,} parameters"
    rows = [[name, *map(_number, values)] for name, *values in shown.itertuples()]
    return _table(caption, rows, ["Parameter", *summary.columns])


def _diagnostics(groups: dict[str, xr.Dataset], summary: pd.DataFrame, statement: str) -> str:
    rows, sizes = [], groups["posterior"].sizes
    if "draw" in sizes:
        kept = f"{counted(sizes['chain'], 'chain')} of {sizes['draw']}"
        rows.append(["Draws that were kept", kept])
    if "dp_accepted" in groups.get("sample_stats", ()):
        chains = groups["sample_stats"]["dp_accepted"].mean("draw").values
        rows.append(["Accepted, by chain", ", ".join(f"{part:.1%}" for part in chains)])
    for column, what in (
        ("r_hat", "Largest R-hat"),
        ("ess_bulk", "Fewest effective draws (bulk)"),
        ("ess_tail", "Fewest effective draws (tail)"),
    ):
        values = summary[column].dropna() if column in summary else pd.Series(dtype=float)
        if len(values):
            at = values.idxmax() if column == "r_hat" else values.idxmin()
            rows.append([what, f"{_number(values[at])}, of {at}"])
    if "posterior_raw" in groups:
        rows.append(["R-hat, effective draws", "of the chains, the group posterior_raw"])
    rows += [["Warning in the statement", text] for text in _warnings_in(statement) or ["none"]]
    return _table("Chains, and warnings", rows)


def _variables(model: Model, posterior: xr.Dataset, facts: dict[str, Any]) -> str:
    """Names of variables, distributions and dims; sizes are those of the released draws."""
    missing = [name for name in posterior if name not in model.named_vars]
    if missing:
        raise ValueError(f"model is not that of the release: it has no variable {missing}.")
    rows = []
    for name, variable in model.named_vars.items():
        sizes = posterior[name].sizes if name in posterior else {}
        dims = model.named_vars_to_dims.get(name, ())
        shown = [f"{dim} ({k})" for dim, k in sizes.items() if dim not in _OF_DRAWS] or dims
        op = getattr(variable.owner, "op", None)
        what = getattr(op, "_print_name", [type(op).__name__])[0]
        if variable in model.deterministics:
            what = "Deterministic"
        elif variable in model.potentials:
            what = "Potential"
        elif variable in model.data_vars:
            what = "Data"
        role = "released" if name in posterior else "not released"
        if name in facts["public"]:
            role = "public"
        elif variable in model.observed_RVs or variable in model.data_vars:
            role = "private"
        rows.append([name, what, ", ".join(map(str, shown)), role])
    return _table("Variables", rows, ["Variable", "Distribution", "Dims", "Released"])


def _settings(released: Any, facts: dict[str, Any]) -> str:
    from pymc_dp import __version__

    settings = facts | facts["settings"]
    rows = [
        [name.replace("_", " ").capitalize(), textwrap.shorten(str(settings[name]), _LONG)]
        for name in _SETTINGS
        if name in settings
    ]
    attrs = released.attrs if isinstance(released, xr.Dataset) else _compat.attributes(released)
    unknown = "not recorded"
    made_by = attrs.get("inference_library_version", unknown)
    versions = [
        ["pymc_dp", facts["pymc_dp_version"], __version__],
        ["PyMC", made_by, version("pymc")],
        *([name, unknown, version(name)] for name in ("ArviZ", "NumPy")),
        ["Python", unknown, platform.python_version()],
    ]
    head = ["Package", "Of the release", "Of this page"]
    return _table("Settings of the sampler, as planned", rows) + _table("Versions", versions, head)


def _checks(facts: dict[str, Any]) -> str:
    """What whoever holds the ledger can run."""
    lines = []
    for promise in facts.get("owners", [facts]):
        name = escape(f" of {promise['name']}" if "name" in promise else "")
        head = escape(promise["ledger_head"])
        if promise["ledger"] == "temporary":
            lines.append(f"<p>The ledger{name} was temporary, and can no longer be checked.</p>")
            continue
        lines.append(
            f"<p>Whoever holds the ledger{name} can check that it goes on from where it was when "
            f"this was released, and see all that was charged to it:</p>"
            f"<p><code>python -m pymc_dp ledger verify FILE --head {head}</code><br>"
            "<code>python -m pymc_dp ledger show FILE</code></p>"
        )
    return "".join(lines)


# -- pieces ---------------------------------------------------------------------------------------


def _table(caption: str, rows: Iterable[Sequence[Any]], head: Sequence[str] = ()) -> str:
    """A table of text, each row of which begins with what it is about."""
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = [f"<thead><tr>{cells}</tr></thead>"] if head else []
    for name, *values in rows:
        cells = "".join(f"<td>{escape(str(value))}</td>" for value in values)
        lines.append(f'<tr><th scope="row">{escape(str(name))}</th>{cells}</tr>')
    return (
        f'<div tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption>{''.join(lines)}</table></div>"
    )


def _number(value: float) -> str:
    """Four digits, and all of those before the point."""
    if not np.isfinite(value):
        return "-"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
