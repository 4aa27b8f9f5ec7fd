"""The directive ``tutorial-gallery``: a card for every notebook in ``tutorials/``, and a toctree.

Title and text of a card are the first heading and the first sentence of the notebook; its picture
is ``tutorials/thumbnails/NAME.png`` or, failing that, ``_static/thumbnail.svg``.
"""

from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective
from summary import summary


class TutorialGallery(SphinxDirective):
    """Cards in the order of the file names."""

    def run(self):
        """Write the cards as Markdown and have them parsed."""
        docs = Path(self.env.srcdir)
        pages = sorted((docs / "tutorials").glob("[0-9]*.md"))
        if not pages:
            return []
        entries = [page.stem for page in pages]
        if (docs / "gallery.md").is_file():
            entries.append("/gallery")
        lines = ["::::{grid} 1 2 2 3", ":gutter: 3"]
        for page in pages:
            self.env.note_dependency(str(page))
            title, text = summary(page.read_text(encoding="utf-8"))
            picture = f"/tutorials/thumbnails/{page.stem}.png"
            if not (docs / picture[1:]).is_file():
                picture = "/_static/thumbnail.svg"
            lines += [
                "",
                f":::{{grid-item-card}} {title}",
                f":link: /tutorials/{page.stem}",
                ":link-type: doc",
                f":img-top: {picture}",
                ":img-alt: ''",
                "",
                text,
                ":::",
            ]
        lines += ["::::", "", "```{toctree}", ":hidden:", "", *entries, "```"]
        holder = nodes.container()
        self.state.nested_parse(
            StringList(lines, source=self.env.docname), self.content_offset, holder
        )
        return holder.children


def setup(app):
    """Register the directive."""
    app.add_directive("tutorial-gallery", TutorialGallery)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
