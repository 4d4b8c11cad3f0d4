"""Settings of the documentation site; `make docs` builds it."""

import pipes

project = "pipes"
author = "the pipes authors"
version = release = pipes.__version__
extensions = ["myst_parser"]
html_theme = "furo"
html_title = f"pipes {version}"
myst_heading_anchors = 2
