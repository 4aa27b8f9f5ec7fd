"""Sphinx configuration of the documentation.

Environment variables: PYMC_DP_DOCS_DRAWS, "full" or "reduced" (see tutorials/_draws.py);
PYMC_DP_DOCS_EXECUTE, "cache" (pages with code run when their code has changed), "force" or "off".
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

import pymc_dp  # noqa: E402

project = "pymc_dp"
author = "The pymc_dp developers"
project_copyright = author
version = release = pymc_dp.__version__

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxcontrib.bibtex",
    "tutorial_gallery",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
templates_path = ["_templates"]
default_role = "literal"

# Pages in Markdown, those with code run.
myst_enable_extensions = ["colon_fence", "deflist", "tasklist"]
myst_heading_anchors = 3
nb_execution_mode = os.environ.get("PYMC_DP_DOCS_EXECUTE", "cache")
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 1800
nb_merge_streams = True
# What was run with few draws is not shown as if it had been run with many.
_draws = os.environ.setdefault("PYMC_DP_DOCS_DRAWS", "reduced")
nb_execution_cache_path = str(HERE / "_build" / f"executed-{_draws}")

# Reference.
autosummary_generate = True
# Names that differ in case only need files that differ in more.
autosummary_filename_map = {"pymc_dp.Release": "pymc_dp.Release-class"}
autodoc_preserve_defaults = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
bibtex_bibfiles = ["references.bib"]
bibtex_reference_style = "author_year"
bibtex_default_style = "plain"
copybutton_prompt_text = ">>> "

# Look.
highlight_options = {"python": {"stripnl": True}}
html_theme = "pydata_sphinx_theme"
html_title = f"pymc_dp {version}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "pymc_dp"},
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "navigation_with_keys": False,
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
}
html_context = {"default_mode": "auto"}
html_sidebars = {
    "index": [],
    "install": [],
    "quickstart": [],
}
