"""Writes a page as one HTML file that needs nothing else and is allowed nothing else."""

import base64
import functools
import hashlib
import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from captum_norm.show.page.document import Maps, Page, Tokens
from captum_norm.show.page.encoding import Precision, encode, precision_of
from captum_norm.text.characters import spelled_lines, spelled_out
from captum_norm.text.files import write_whole

_NO_SCRIPT = "This page draws with the script that it contains: switch on JavaScript."
_PRECISE_TO = {
    "f2": "Maps are stored in half precision (three digits).",
    "i1": "Maps are stored in 127 steps: to 1/254 of each map's largest entry.",
}


def render(page: Page) -> str:
    """Render a page as one self-contained HTML file.

    The file has its data, script and style inside. Its content policy allows this script and this style by their hashes
    and images from the file itself; nothing else, in particular no request to anywhere. Everything in the page is
    escaped, and characters that are unprintable or change the direction of text are spelled out.

    Args:
        page: the data.

    Returns:
        A complete HTML document, for :func:`write_page`; or for the ``srcdoc`` of an
        ``<iframe sandbox="allow-scripts">``.

    Example:
        >>> from captum_norm.show.page import Page
        >>> "&lt;script&gt;" in render(Page("<script>"))
        True
    """
    precision = precision_of(maps.values.shape for example in page.examples for maps in example.maps)
    notes = [*page.notes, *([_PRECISE_TO[precision]] if precision in _PRECISE_TO else [])]
    content = _content(page, precision) | {"notes": [spelled_lines(note) for note in notes]}
    script, style = _asset("page.js"), _asset("page.css")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{_text(page.title)}</title>",
            f"<style>{style}</style>",
            "<body>",
            *_header(page),
            f'<main id="views"><noscript><p>{_NO_SCRIPT}</p></noscript></main>',
            *([] if not notes else ["<footer>", *(f"<p>{_text(note)}</p>" for note in notes), "</footer>"]),
            f'<script type="application/json" id="page">{_json(content)}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>\n",
        ]
    )


def write_page(path: str | os.PathLike[str], page: Page | str) -> Path:
    """Write a page atomically.

    Args:
        path: the file; its folder must exist.
        page: the page, or the HTML of one, such as :func:`captum_norm.show.render_explanation` returns.

    Returns:
        The path.

    Raises:
        OSError: the folder does not exist or cannot be written to.

    Example:
        >>> import tempfile
        >>> from captum_norm.show.page import Page
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_page(folder + "/norms.html", Page("Norms")).name
        'norms.html'
    """
    return write_whole(path, (render(page) if isinstance(page, Page) else page).encode())


def _header(page: Page) -> list[str]:
    facts = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in page.facts.items())
    lead = [f'<p class="lead">{_text(page.lead)}</p>'] if page.lead else []
    return ["<header>", f"<h1>{_text(page.title)}</h1>", *lead, *([f"<dl>{facts}</dl>"] if facts else []), "</header>"]


def _text(text: str) -> str:
    return html.escape(spelled_lines(text))


def _json(content: Any) -> str:
    """JSON that may stand in a script element: without ``<``, so that nothing in it ends the element."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _content(value: Any, precision: Precision) -> Any:
    """The data as JSON has it: the dataclasses' fields under their names, arrays encoded, texts printable."""
    if is_dataclass(value):
        content = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, Tokens):
            shown = {name: _shown(content[name]) for name in ("texts", "word_texts") if content[name] is not None}
            return content | shown | {"words": None if value.words is None else [int(word) for word in value.words]}
        if isinstance(value, Maps):
            content["values"] = encode(value.values, precision)
            content["layers"] = [int(layer) for layer in value.layers]
        return {name: _content(entry, precision) for name, entry in content.items()}
    if isinstance(value, str):
        return spelled_lines(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, np.ndarray):
        return encode(value)
    if isinstance(value, Mapping):
        return {_content(name, precision): _content(entry, precision) for name, entry in value.items()}
    if isinstance(value, Sequence):
        return [_content(entry, precision) for entry in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(texts: Sequence[str]) -> list[str]:
    return [spelled_out(text) or "∅" for text in texts]


@functools.cache
def _asset(name: str) -> str:
    """One of the files that ``make script`` writes."""
    return (files("captum_norm.show.page") / "assets" / name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"
