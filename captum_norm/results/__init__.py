"""Shows results as pages and figures, by functions that the packages that draw register for types."""

from functools import singledispatch
from importlib import import_module
from typing import Any

__all__ = ["draw_by", "make_figure", "make_file", "make_page"]

_MODULES: dict[str, str] = {}


def draw_by(package: str, module: str) -> None:
    """Name the module that registers the views of a top package's results; it is imported when one is first shown."""
    _MODULES[package] = module


@singledispatch
def make_page(result: Any) -> Any:
    """Return the page of a result, a :class:`captum_norm.show.page.Page`.

    ``make_page.register(kind)`` says how that of a type is made.
    """
    raise NotImplementedError(f"{type(result).__name__} has no page")


@singledispatch
def make_figure(result: Any) -> Any:
    """Return the figure of a result, a :class:`matplotlib.figure.Figure`.

    ``make_figure.register(kind)`` says how that of a type is drawn.
    """
    raise NotImplementedError(f"{type(result).__name__} has no figure")


@singledispatch
def make_file(shown: Any, suffix: str) -> bytes:
    """Return the content of a file with this suffix, of a page (``.html``) or figure (``.png``, ``.svg``, ``.pdf``)."""
    raise NotImplementedError(f"{type(shown).__name__} is no page and no figure")


def import_views(result: Any) -> None:
    """Import what registers the views of a result's type."""
    for kind in type(result).__mro__:
        module = _MODULES.get(kind.__module__.partition(".")[0])
        if module is not None:
            import_module(module)
