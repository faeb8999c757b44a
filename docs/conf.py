"""Sphinx configuration."""

import os
import sys
from collections import namedtuple
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

project = "captum-norm"
author = "captum-norm contributors"
copyright = f"2026, {author}"
version = release = installed_version(project)

sys.path.insert(0, str(Path(__file__).parent))
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "mathml"]
exclude_patterns = ["_build", "paper"]
nitpicky = True
# The build works offline, without intersphinx: other projects' names are plain text. Overloads and quoted annotations
# show names as written; a type variable has no page.
_ELSEWHERE = r"(argparse|captum|collections|matplotlib|numpy|os|pathlib|pd|re|rich|sacrebleu|torch|transformers|xr)\..*"
_TYPE_VARIABLES = (
    r"alignment\.subwords\.Piece|captum_norm\.(loading|runs)\.\w+\.(Model|Result)|captum_norm\.checks\.T|Method"
)
# The reference names internals of the engine where methods meet them, but does not document them.
_ENGINE = (
    r"captum_norm\.(models|forward|memory|urls)\.\w+(\.\w+)*|captum_norm\.results\.stacks\.Side"
    r"|captum_norm\.attr\.output\.OutputAttribution|captum_norm\.generation\.prompts\.Prompt"
)
# "(Any, optional)" is in a docstring of Captum that a class here inherits.
_QUOTED = r"optional|Figure|Page|io\.BufferedWriter|tqdm|nn\.Module|PreTrainedModel|PreTrainedTokenizerBase|Tensor"
nitpick_ignore_regex = [("py:.*", rf"{_ELSEWHERE}|{_TYPE_VARIABLES}|{_ENGINE}|{_QUOTED}")]

myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

# Notebooks run anew in each build: a cache would not see that the library has changed.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_in_temp = True
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars, and what libraries log as they are imported
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # no page asks another host
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_attr_annotations = False  # they are in the signature
napoleon_numpy_docstring = False
# Under "Returns:", a shape precedes the colon; as an rtype it would be looked up as a class.
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_extra_path = ["llms.txt"]
html_css_files = ["reference.css"]


def setup(app: Sphinx) -> None:
    """Document a named tuple's fields in its docstring only, like a dataclass's; allow colons in docstrings of data."""
    field = type(namedtuple("Sample", "field").field)
    app.connect("autodoc-skip-member", lambda *event: isinstance(event[3], field) or None)
    app.connect("autodoc-process-docstring", _keep_colon, priority=499)  # napoleon's is 500


def _keep_colon(_app: Sphinx, what: str, *event: Any) -> None:
    """Start docstrings of data with an empty comment, or napoleon takes the first line up to a colon for a type."""
    if what == "data":
        event[-1][:0] = ["..", ""]
