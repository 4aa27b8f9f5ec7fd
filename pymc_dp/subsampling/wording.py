"""Refusals of what is not a sum over records, in the words of subsampling.

The graph of a model is read as for private steps, whose refusals speak of what is private.
"""

from __future__ import annotations

import re

_WORDS = (
    (r" \(which rows are concerned is not shown here: it is private\)", ""),
    (r"the private samplers move", "the sampler moves"),
    (r"are not private per record", "are no sum over records"),
    (
        r"Per-record latent variables cannot be released; integrate them out, or index them by a "
        r"public group\.",
        "Most of them would have no record in a sample: integrate them out, or index them by a "
        "group.",
    ),
    (r"Use integer labels: the number of rows kept is private\.", "Use integer labels instead."),
    (
        r"If it is not private, declare it: PrivacyBudget\(public=\[.*?\]\)\.",
        "It has as many entries as there are records, of which a sample takes a part: compute "
        "what is needed of it before the model is built.",
    ),
    (r"; if the array is public, pass it as pm\.Data and declare it in [^)]*\)", ""),
    (r"Standardise with public constants", "Standardise with constants"),
    (
        r"which is private or may hold private data\. Choose it from public knowledge, or declare "
        r"the data in PrivacyBudget\(public=\.\.\.\)\.",
        "which holds data of the records, or may. Compute what it needs before the model is built.",
    ),
    (r"; that is private under neighboring='add_or_remove_one' and with a privacy_unit", ""),
    (r"nothing can be hidden among so few", "there is nothing to take a sample of"),
    (r"a public group", "a group"),
    (
        r"the scores that would be released do not show it, so no budget is large enough\. Fix the "
        r"end at a public value",
        "most samples of records do not hold them. Fix the end at a constant",
    ),
    (r", or publish noisy counts .*PrivacyAwareGibbs", ", or use NUTS"),
)


def in_words_of_subsampling(message: str) -> str:
    """A refusal without mention of privacy."""
    for pattern, words in _WORDS:
        message = re.sub(pattern, words, message)
    return message
