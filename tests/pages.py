"""Reads pages: their elements, and the data inside."""

import base64
import json
import zlib
from html.parser import HTMLParser
from typing import Any

import numpy as np

from captum_norm.show.page import EncodedArray


class Elements(HTMLParser):
    """The tags of a page in order, and the texts directly inside each."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.found:
            tag, attributes, text = self.found[-1]
            self.found[-1] = (tag, attributes, text + data)

    def of(self, tag: str) -> list[str]:
        return [text.strip() for name, _, text in self.found if name == tag]


def content(page: str) -> Any:
    """The data in a page, arrays encoded."""
    return json.loads(Elements(page).of("script")[0])


def decoded(array: EncodedArray) -> np.ndarray[Any, Any]:
    """The array as its docstring defines it."""
    raw = np.frombuffer(zlib.decompress(base64.b64decode(array["data"])), "u1")
    width = {"f4": 4, "f2": 2, "i1": 1}[array["dtype"]]
    entries: np.ndarray[Any, Any] = np.frombuffer(raw.reshape(width, -1).T.tobytes(), f"<{array['dtype']}")
    if array["dtype"] == "i1":
        *leading, rows, columns = array["shape"]
        largest: np.ndarray[Any, Any] = np.array(array["max"]).reshape([*leading, 1, 1])
        shares: np.ndarray[Any, Any] = entries.reshape([*leading, columns, rows]).swapaxes(-1, -2) / 127
        scaled: np.ndarray[Any, Any] = shares * largest
        return scaled
    exact: np.ndarray[Any, Any] = entries.reshape(array["shape"])
    return exact if array["dtype"] == "f4" else np.asarray(exact.astype("f8") * array["max"][0])
