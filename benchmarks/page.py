"""Where pages answer their question, how large they are and how fast: ``python -m benchmarks.page``.

One table opens every kind of page on a desktop's and a phone's screen, and says where the sentence with the answer and
the picture that shows it are, in pixels from the top, and whether both are on the first screen.

The other has pages of norms per head of the MiniLM encoder (6 layers, 12 heads) for pieces of English text: one of 64
tokens with weights next to norms, 50 of 64 tokens with the layers twice, which makes 12, and one of 482 with 12. The
same of uniform random numbers, which hardly compress. Times count from the start of navigation, in Chromium, from a
file, in a fresh profile; the best of a few. *Paint*: something is on the screen; *drawn*: all views of the first
example are; *hover*: from pointing at a token to the next picture, the longest of ten tokens.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from playwright.sync_api import Browser
from rich.console import Console
from rich.table import Table

from benchmarks.pictures import FILES, SENTENCE, run
from captum_norm import AttentionWeights, NormAttribution
from captum_norm.loading import LANGUAGE_MODEL, load
from captum_norm.show.page import Example, Maps, Page, render
from captum_norm.show.pages import tokens_of
from captum_norm.text.words import words_of_tokens
from tests import encoder_decoders
from tests.browser.visits import started

TOKENS, LONG = 64, 482
SCREENS = ((1400, 900), (390, 844))
TEXTS = {
    "story.fr": "Le petit chat noir dort sur la chaise de la cuisine .\nElle a perdu les clés de sa maison .\n",
    "story.en": "The little black cat sleeps on the kitchen chair .\nShe lost the keys of her house .\n",
}
COMPONENTS = f"{SENTENCE} --components heads,feed_forward,residual --method relp"
ANSWER = "captum-norm explain prompt.txt --generate 20 --method decompx"


def _encoder_decoder() -> None:
    maps = NormAttribution(encoder_decoders.build("bart")).maps(encoder_decoders.inputs("bart", batch=1))
    Path("page.html").write_text(render(maps.page()), encoding="utf-8")


KINDS: dict[str, str | Callable[[], None]] = {
    "explain, encoder": f"{SENTENCE} --out page.html",
    "explain, causal": f"{SENTENCE} --model {LANGUAGE_MODEL} --out page.html",
    "explain, several texts": "captum-norm explain sentences.txt --lines --out page.html",
    "maps, encoder–decoder": _encoder_decoder,
    "answer": f"{ANSWER} --out page.html",
    "answer, segments": f"{ANSWER} --segments line --out page.html",
    "components": f"{COMPONENTS} --out page.html",
    "components, edges": f"{COMPONENTS} --out page.html".replace("residual", "residual,edges"),
    "picture": "python patches.py",
    "compare": "captum-norm compare sentences.txt --methods decompx,norm,weights,rollout,random --out page.html",
    "analyze": "captum-norm analyze special-tokens --limit 40 --out study",
    "extract": "norm-align extract story.fr story.en --tokenize --out links.txt --overwrite --page page.html",
    "sweep": "norm-align sweep --corpus alibi=blue-beard --no-gradients --bootstrap 0 --out sweep",
}
WRITTEN = {"picture": "patches.html", "analyze": "study/report.html", "sweep": "sweep/blue-beard.html"}

_DRAWN = """() => new Promise((done) => {
  const wait = () => document.querySelector(".maps [role=application][aria-label]")
    ? requestAnimationFrame(() => setTimeout(() => done(performance.now()), 0))
    : requestAnimationFrame(wait);
  wait();
})"""
_HOVER = """async () => {
  const tokens = [...document.querySelectorAll(".strip .token")];
  let longest = 0;
  for (let place = 0; place < 10; place++) {
    const start = performance.now();
    tokens[Math.floor((place * tokens.length) / 10)].dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
    longest = Math.max(longest, performance.now() - start);
  }
  return longest;
}"""
_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def answers(browser: Browser) -> Table:
    """Open every kind of page on both screens."""
    screens = [f"{width} × {height}" for width, height in SCREENS]
    table = Table(
        "page", *(f"{part}, {screen}" for screen in screens for part in ("sentence", "picture", "inside")), box=None
    )
    for name, text in (FILES | TEXTS).items():
        Path(name).write_text(text, encoding="utf-8")
    for kind, command in KINDS.items():
        command() if callable(command) else run(command)
        cells = []
        for width, height in SCREENS:
            context = browser.new_context(offline=True, viewport={"width": width, "height": height})
            tab = context.new_page()
            tab.goto(Path(WRITTEN.get(kind, "page.html")).resolve().as_uri())
            places = [tab.locator(part).first.bounding_box() for part in (".answer", "[data-answer]")]
            ends = [(int(box["y"]), int(box["y"] + box["height"])) if box else (0, 1 << 20) for box in places]
            cells += [f"{top} – {bottom}" for top, bottom in ends]
            cells.append("yes" if max(bottom for _, bottom in ends) <= height else "no")
            context.close()
        table.add_row(kind, *cells)
    return table


def examples(count: int, length: int = TOKENS) -> Iterator[Example]:
    """Norms per head of pieces of a text, and next to them weights per head."""
    model, tokenizer = load()
    text = (files("captum_norm.lab.analysis") / "data" / "europarl-en.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    size = length - 2
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


def opened(browser: Browser, path: Path, times: int) -> tuple[float, float, float]:
    """Return the milliseconds until something is painted, until all is drawn, and of pointing: the least of several."""
    found = []
    for _ in range(times):
        context = browser.new_context(offline=True, viewport={"width": 1280, "height": 800})
        page = context.new_page()
        page.goto(path.as_uri(), wait_until="commit")
        drawn = page.evaluate(_DRAWN)
        page.wait_for_timeout(500)
        found.append((page.evaluate(_PAINT), drawn, page.evaluate(_HOVER)))
        context.close()
    paints, drawings, hovers = zip(*found, strict=True)
    return min(paints), min(drawings), min(hovers)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--examples", type=int, default=50, help="of the large pages; 0: the first table alone (default: %(default)s)"
    )
    parser.add_argument("--visits", type=int, default=3, help="of each page (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.examples:
        print_sizes(options.examples, options.visits)
    with tempfile.TemporaryDirectory() as folder, chdir(folder), started() as browser:
        if browser:
            Console().print(answers(browser))


def print_sizes(count: int, visits: int) -> None:
    """Print the table of sizes and times."""
    pieces = list(examples(count))
    (long,) = map(doubled, examples(1, LONG))
    large = [doubled(piece) for piece in pieces]
    shape = " × ".join(map(str, large[0].maps[0].values.shape))
    pages = {
        f"1 × 6 × 12 × {TOKENS} × {TOKENS}, norms and weights": pieces[:1],
        f"{len(large)} × {shape}, norms": large,
        f"{len(large)} × {shape}, random": [randomised(piece, seed) for seed, piece in enumerate(large)],
        f"1 × 12 × 12 × {LONG} × {LONG}, norms": [long],
        f"1 × 12 × 12 × {LONG} × {LONG}, random": [randomised(long, 0)],
    }
    table = Table("page", "written, s", "MB", "paint, ms", "drawn, ms", "hover, ms", box=None)
    with tempfile.TemporaryDirectory() as folder, started() as browser:
        for title, shown in pages.items():
            start = time.perf_counter()
            html = render(Page(title, examples=shown))
            seconds = time.perf_counter() - start
            path = Path(folder) / "page.html"
            path.write_text(html, encoding="utf-8")
            times = opened(browser, path, visits) if browser else ()
            size = path.stat().st_size / 1e6
            table.add_row(title, f"{seconds:.1f}", f"{size:.2f}", *(f"{time:.0f}" for time in times))
    Console().print(table)


if __name__ == "__main__":
    main()
