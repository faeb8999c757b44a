"""Reads word alignments off translation models; scores, symmetrises and writes them."""

import lazy_loader

# Names are loaded when they are asked for: torch takes seconds, and files, scores and --help do without.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
