"""Explains Transformers by the vectors that their attention adds up: norms, not weights alone."""

import lazy_loader

from captum_norm.versions import __version__ as __version__

# Names are loaded when they are asked for: torch takes seconds, and errors and --help do without.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
