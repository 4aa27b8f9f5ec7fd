"""What the card of a notebook says."""

import re


def summary(text):
    """First heading and first sentence of a notebook in Markdown."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"^(`{3,}|:{3,}).*?^\1\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    title = re.search(r"^# (.+)$", text, flags=re.MULTILINE)
    if title is None:
        raise ValueError("the notebook has no heading")
    after = text[title.end() :].strip()
    sentence = re.split(r"\n\s*\n|(?<=[.!?])\s", after)[0]
    return title.group(1).strip(), " ".join(sentence.split())
