"""Writes formulas as MathML, which browsers show without a script or a font from elsewhere."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.typing import ExtensionMetadata
from sphinx.writers.html5 import HTML5Translator

# The converter leaves what it does not know as it is. Letters have no styles in MathML now: write ℝ, not \mathbb R.
_LEFT_OVER = re.compile(r'\\\w+|mathvariant="(?!normal)[\w-]+"')

_logger = logging.getLogger(__name__)


def to_mathml(formula: str, *, block: bool = False) -> str:
    """Return a formula in TeX's notation as MathML.

    Raises:
        ValueError: a part of it has no MathML.
    """
    converted: str = convert(formula, display="block" if block else "inline")
    if left := _LEFT_OVER.search(converted):
        raise ValueError(f"no MathML for {left[0]} in {formula!r}")
    return converted


def _write(translator: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    try:
        translator.body.append(to_mathml(node.astext(), block=isinstance(node, nodes.math_block)))
    except ValueError as error:
        _logger.warning("%s", error, location=node)
    raise nodes.SkipNode


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (_write, None), (_write, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
