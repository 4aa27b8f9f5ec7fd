"""How many draws the tutorials make: the full number, or a reduced one for quick builds."""

import os


def draws(full, reduced):
    """`full` or `reduced`, by the environment variable PYMC_DP_DOCS_DRAWS ("reduced" if unset)."""
    choices = {"full": full, "reduced": reduced}
    wanted = os.environ.get("PYMC_DP_DOCS_DRAWS", "reduced")
    if wanted not in choices:
        raise ValueError(f"PYMC_DP_DOCS_DRAWS is {wanted!r}; it must be 'full' or 'reduced'")
    return choices[wanted]
