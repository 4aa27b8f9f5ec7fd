"""Whether every relative link of a built site leads to a file, and every anchor to an element.

``python docs/check_links.py docs/_build/html`` lists what does not and then fails.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """Targets and anchors of a page."""

    def __init__(self):
        super().__init__()
        self.targets, self.anchors = set(), set()

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)
            elif name in ("href", "src"):
                self.targets.add(value)


def broken_links(site):
    """Pairs of a page and a target that is missing, for all pages under `site`."""
    site = Path(site).resolve()
    pages = {}
    for path in sorted(site.rglob("*.html")):
        if "_static" in path.parts:
            continue  # templates of the theme
        pages[path] = _Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    broken = []
    for path, page in pages.items():
        for target in sorted(page.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if file.is_dir():
                file = file / "index.html"
            anchor = unquote(parts.fragment)
            missing = not file.is_file()
            if missing or (anchor and file in pages and anchor not in pages[file].anchors):
                broken.append((str(path.relative_to(site)), target))
    return broken


if __name__ == "__main__":
    found = broken_links(sys.argv[1])
    for page, target in found:
        print(f"{page}: {target} leads nowhere")
    sys.exit(bool(found))
