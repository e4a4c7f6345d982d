"""Sphinx: `pip install '.[docs]'`, then `sphinx-build -W docs build/docs`."""

import importlib.metadata
import importlib.util
import posixpath
import re
from pathlib import Path

project = "ragged-attention"
author = "the ragged-attention contributors"
copyright = author
version = release = importlib.metadata.version("ragged-attention")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["**/.*"]
nitpicky = True
# Names of other projects: nothing is fetched to look them up.
nitpick_ignore_regex = [("py:.*", r"(numpy|torch|jax|cupy|transformers)\..*")]
highlight_language = "text"  # of blocks that name none

myst_heading_anchors = 3

# The docstrings give shapes and dtypes, which annotations of tensors cannot.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
# The pages of the integrations are written without the frameworks too.
autodoc_mock_imports = [name for name in ("torch", "jax", "transformers") if importlib.util.find_spec(name) is None]

html_theme = "furo"
html_title = f"ragged-attention {release}"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "source_repository": "https://github.com/ragged-attention/ragged-attention",
    "source_branch": "main",
    "source_directory": "docs/",
}

_BLOB = "https://github.com/ragged-attention/ragged-attention/blob/main"


def _links_out_of_docs(app, docname, source):
    """Links to files of the repository outside docs/, which work in a checkout, become links to where it is hosted."""

    def rewritten(link):
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(docname), link[1]))
        if target == "CONTRIBUTING.md":
            return f"](/contributing.md{link[2] or ''})"
        return link[0] if target.startswith("docs/") else f"]({_BLOB}/{target}{link[2] or ''})"

    source[0] = re.sub(r"\]\((\.\./[^)#]*)(#[^)]*)?\)", rewritten, source[0])


def _patterns_without_pages(app, docname, source):
    """A pattern in the index for which there is no page is left out: Sphinx would warn."""

    def kept(line):
        return "" if "*" in line[0] and not any(Path(app.srcdir).glob(f"{line[1]}.md")) else line[0]

    if docname == "index":
        source[0] = re.sub(r"(?m)^([\w*/]+)\n", kept, source[0])


def setup(app):
    app.connect("source-read", _patterns_without_pages)
    app.connect("source-read", _links_out_of_docs)
