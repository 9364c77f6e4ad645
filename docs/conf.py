"""Settings of the documentation site; CONTRIBUTING.md has the command that builds it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

import zae

project = "zae"
author = copyright = "The zae authors"
version = release = zae.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "checkout"]
exclude_patterns = ["_build"]
# Every reference has to resolve. Links to other sites are not followed: `-b linkcheck` does that, with a network.
nitpicky = True

# Pages are read in a checkout too: directives stand between colons, and anchors are those of GitHub.
myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = "zae"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

copybutton_exclude = ".linenos, .gp, .go"  # Copied without prompts and output.
