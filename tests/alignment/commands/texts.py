"""A few sentences in French and English, and standard input that holds them."""

import io
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

FRENCH = [
    "La maison est petite .",
    "Le débat est clos .",
    "Je vous remercie de votre attention .",
    "L' école de l' Europe",
    "Le vote aura lieu demain .",
    "Nous avons adopté la proposition de résolution .",
]
ENGLISH = [
    "The house is small .",
    "The debate is closed .",
    "Thank you for your attention .",
    "The school of Europe",
    "The vote will take place tomorrow .",
    "We have adopted the motion for a resolution .",
]
PAIRS = [f"{source} ||| {target}" for source, target in zip(FRENCH, ENGLISH, strict=True)]


def write_texts() -> None:
    """Writes the sentences into the current folder: ``fr``, ``en``, and ``pairs`` of both."""
    write("fr", FRENCH)
    write("en", ENGLISH)
    write("pairs", PAIRS)


def lines(name: str) -> list[str]:
    """Reads the lines of a file of links."""
    return Path(name).read_text(encoding="ascii").splitlines()


def write(name: str, lines: Iterable[str | bytes]) -> None:
    """Writes lines into a file of the current folder."""
    encoded = (line if isinstance(line, bytes) else line.encode() for line in lines)
    Path(name).write_bytes(b"".join(line + b"\n" for line in encoded))


def set_stdin(monkeypatch: pytest.MonkeyPatch, lines: Iterable[str]) -> None:
    """Puts lines on standard input."""
    content = "".join(f"{line}\n" for line in lines).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
