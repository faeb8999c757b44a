"""Explains Transformers by the norms of the vectors that attention sums, not by weights alone."""

import lazy_loader

from captum_norm.results import draw_by
from captum_norm.versions import __version__ as __version__

# Names are imported on first use: torch takes seconds, and errors and --help do not need it.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

draw_by("captum_norm", "captum_norm.show")
