"""Settings of the documentation site; CONTRIBUTING.md has the command that builds it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

import zae

project = "zae"
author = copyright = "The zae authors"
version = release = zae.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
extensions += ["checkout", "layout", "reference"]  # In _extensions.
exclude_patterns = ["_build"]
# Every reference has to resolve. Links to other sites are not followed: `-b linkcheck` does that, with a network.
nitpicky = True
# Types in signatures: those of torch and of Python have no page here, and neither have private ones of zae. Names in
# texts are checked: they have the role of default_role.
nitpick_ignore_regex = [("py:class", r".*")]

# Pages are read in a checkout too: directives stand between colons, and anchors are those of GitHub.
myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 90
default_role = "py:obj"
napoleon_use_param = napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style"), ("Raises", "params_style")]

toc_object_entries_show_parents = "hide"
html_theme = "furo"
html_static_path, html_css_files = ["_static"], ["site.css"]
html_title = "zae"
html_show_sphinx = False
html_copy_source = False
html_search_scorer = str(Path(__file__).parent / "_static" / "search_scorer.js")
html_show_search_summary = False  # The search would fetch each page it found, which browsers refuse to files.

copybutton_exclude = ".linenos, .gp, .go"  # Copied without prompts and output.
