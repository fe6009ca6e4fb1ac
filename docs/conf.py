"""The documentation: MyST-NB pages, notebooks as they are stored, and the API from the docstrings."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "sdeinfer"
author = "the sdeinfer authors"
copyright = "the sdeinfer authors"  # noqa: A001
release = version_of("sdeinfer")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "command_help",
    "mathml",
    "notebook_figure",
    "notebooks",
    "plain_docstrings",
    "public_names",
    "source_links",
]
exclude_patterns = ["_build", "_ext", "_templates"]
templates_path = ["_templates"]
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # tests/test_notebooks.py runs them

nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!sdeinfer\.).*|.*\._.*")]  # types of other packages, and of private modules

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Without the types that napoleon takes from the signature, or from what is before a colon.
napoleon_custom_sections = [("Attributes", "params_style"), "Returns"]
python_maximum_signature_line_length = 88

html_theme = "sphinx_book_theme"
html_title = "sdeinfer"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "_static" / "scorer.js")
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"home_page_in_toc": True, "show_toc_level": 2, "use_download_button": False}

# Pages that are gone, and where their readers go.
MOVED = {
    "gallery": "notebooks.html#figures",
    "guides/index": "../index.html",
    "walkthroughs": "development.html",
    "guides/criterion": "initialisation.html#a-criterion-of-your-own",
    "guides/prior": "model.html#replace-a-prior-fix-a-parameter",
    "guides/your_program": "model.html#is-your-program-calibrated",
    "guides/trained": "../limits.html#trained-networks",
    "guides/compare": "misfit.html#compare-architectures",
    "guides/speed": "larger_than_memory.html",
    "theory/exact_laws": "layers.html#exact-laws",
    "theory/patterns": "noise.html#attention-patterns",
    "theory/bridges": "likelihood.html#layers-between-two-observations",
    "theory/criteria": "tuning.html#derivatives-of-criteria",
    "theory/increments": "blocks.html#the-density-of-an-increment",
    "theory/reading_the_paper": "index.html#where-to-find-an-equation-of-the-paper",
    "theory/meanfield_inference": "meanfield.html#the-law-of-observed-tokens",
}


def write_redirects(app, exception):
    """Write a page for each one that is gone, which sends browsers on."""
    if exception is None and app.builder.format == "html":
        for page, target in MOVED.items():
            text = f'<meta http-equiv="refresh" content="0; url={target}"><a href="{target}">This page has moved.</a>\n'
            Path(app.outdir, f"{page}.html").write_text(text, encoding="utf-8")


def setup(app):
    """Write the redirects after a build."""
    app.connect("build-finished", write_redirects)
