"""Extracts word alignments from translation models; scores, symmetrises and writes them."""

import lazy_loader

from captum_norm.results import draw_by

# Lazily: importing torch takes seconds, and files, scores and --help do not need it.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

draw_by("alignment", "alignment.pages")
