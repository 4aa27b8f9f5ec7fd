"""What the tutorials share when they are built: numbers of draws, and warnings without paths."""

import os
import warnings


def draws(full, reduced):
    """`full` or `reduced`, by the environment variable PYMC_DP_DOCS_DRAWS ("reduced" if unset)."""
    choices = {"full": full, "reduced": reduced}
    wanted = os.environ.get("PYMC_DP_DOCS_DRAWS", "reduced")
    if wanted not in choices:
        raise ValueError(f"PYMC_DP_DOCS_DRAWS is {wanted!r}; it must be 'full' or 'reduced'")
    return choices[wanted]


def _without_path(message, category, filename, lineno, line=None):
    """A warning as a page shows it."""
    return f"{category.__name__}: {message}\n"


warnings.formatwarning = _without_path
