"""The size of pages and how fast they open: ``python -m benchmarks.page``.

Pages of norms per head of the MiniLM encoder (6 layers, 12 heads) for pieces of 64 tokens of English text: one piece
with weights next to norms, and 50 pieces with the layers twice, which makes 12. The same of uniform random numbers,
which hardly compress. Times count from the start of navigation, in Chromium, from a file, in a fresh profile; the best
of a few. *Paint*: something is on the screen; *drawn*: all views of the first example are.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from playwright.sync_api import Browser
from rich.console import Console
from rich.table import Table

from captum_norm import AttentionWeights, NormAttribution
from captum_norm.loading import load
from captum_norm.show.page import Example, Maps, Page, render
from captum_norm.show.pages import tokens_of
from captum_norm.text.words import words_of_tokens
from tests.browser.visits import started

TOKENS = 64
_DRAWN = """() => new Promise((done) => {
  const wait = () => document.querySelector(".maps [role=application][aria-label]")
    ? requestAnimationFrame(() => setTimeout(() => done(performance.now()), 0))
    : requestAnimationFrame(wait);
  wait();
})"""
_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def examples(count: int) -> Iterator[Example]:
    """Norms per head of pieces of a text, and next to them weights per head."""
    model, tokenizer = load()
    text = (files("captum_norm.lab.analysis") / "data" / "europarl-en.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    size = TOKENS - 2
    for number in range(count):
        piece = [tokenizer.cls_token_id, *ids[number * size : (number + 1) * size], tokenizer.sep_token_id]
        tokens = tokenizer.convert_ids_to_tokens(piece)
        maps = []
        for name, method in (("norm", NormAttribution(model)), ("weights", AttentionWeights(model))):
            values = method.maps(torch.tensor([piece]), per_head=True).encoder
            assert values is not None
            maps.append(Maps(name, name, values[0], list(range(values.shape[1]))))
        yield Example(f"piece {number}", tokens_of(words_of_tokens(tokens)), maps=maps)


def doubled(example: Example) -> Example:
    """The norms alone, with the layers twice."""
    norms = example.maps[0]
    values = np.concatenate([norms.values, norms.values])
    return replace(example, maps=[replace(norms, values=values, layers=list(range(len(values))))])


def randomised(example: Example, seed: int) -> Example:
    """Uniform random numbers in place of the maps."""
    draw = np.random.default_rng(seed)
    return replace(example, maps=[replace(maps, values=draw.random(maps.values.shape)) for maps in example.maps])


def opened(browser: Browser, path: Path, times: int) -> tuple[float, float]:
    """Return the milliseconds until something is painted, and until all is drawn: the least of several visits."""
    found = []
    for _ in range(times):
        context = browser.new_context(offline=True, viewport={"width": 1280, "height": 800})
        page = context.new_page()
        page.goto(path.as_uri(), wait_until="commit")
        drawn = page.evaluate(_DRAWN)
        found.append((page.evaluate(_PAINT), drawn))
        context.close()
    paints, drawings = zip(*found, strict=True)
    return min(paints), min(drawings)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=50, help="of the large pages (default: %(default)s)")
    parser.add_argument("--visits", type=int, default=3, help="of each page (default: %(default)s)")
    options = parser.parse_args(arguments)
    pieces = list(examples(options.examples))
    large = [doubled(piece) for piece in pieces]
    shape = " × ".join(map(str, large[0].maps[0].values.shape))
    pages = {
        f"1 × 6 × 12 × {TOKENS} × {TOKENS}, norms and weights": pieces[:1],
        f"{len(large)} × {shape}, norms": large,
        f"{len(large)} × {shape}, random": [randomised(piece, seed) for seed, piece in enumerate(large)],
    }
    table = Table("page", "written, s", "MB", "paint, ms", "drawn, ms", box=None)
    with tempfile.TemporaryDirectory() as folder, started() as browser:
        for title, shown in pages.items():
            start = time.perf_counter()
            html = render(Page(title, examples=shown))
            seconds = time.perf_counter() - start
            path = Path(folder) / "page.html"
            path.write_text(html, encoding="utf-8")
            paint, drawn = opened(browser, path, options.visits) if browser else (float("nan"), float("nan"))
            size = path.stat().st_size / 1e6
            table.add_row(title, f"{seconds:.1f}", f"{size:.2f}", f"{paint:.0f}", f"{drawn:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
