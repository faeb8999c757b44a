"""Makes the pictures of the documentation and the page that shows them: what commands write, in a browser.

``make pictures`` runs this module. It needs Chromium, on PATH or named by the variable CAPTUM_NORM_CHROMIUM.
"""

import argparse
import io
import os
import runpy
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from PIL import Image

import alignment.cli
import captum_norm.cli
from tests.browser.visits import started

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "_static" / "gallery"
MOST_BYTES = 150_000
COLORS = 96

INTRODUCTION = """\
# Gallery

Written by `python -m benchmarks.pictures` (`make pictures`), with all pictures. A page is a
single file: open it from disk, send it or keep it. Below each picture is the command that wrote its page. All commands
run offline, with models that come with the packages.
"""

PROGRAMS: Mapping[str, Callable[[list[str]], int]] = {
    "captum-norm": captum_norm.cli.main,
    "norm-align": alignment.cli.main,
    "python": lambda arguments: bool(runpy.run_path(arguments[0]) is None),
}
FILES = {
    "prompt.txt": """\
Eva lives in Prague with a golden guitar and a lawyer. It was a long time ago.
Clara found a tiny silver ring in the garden. Nobody knows why.
Victor works as a baker near the market of Rome. There is more to say.
What did Clara find? Clara found""",
    "sentences.txt": "A man is playing a guitar on stage.\nTwo dogs run along the beach in the sun.\n",
    "patches.py": """\
import torch
from transformers import ViTConfig, ViTModel

from captum_norm import NormAttribution
from captum_norm.show import patches_page

torch.manual_seed(0)
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 192, "patch_size": 16}
model = ViTModel(ViTConfig(**sizes, initializer_range=0.2)).eval()
down, across = torch.meshgrid(torch.linspace(-1, 1, 192), torch.linspace(-1, 1, 192), indexing="ij")
disc = ((down - 0.2) ** 2 + (across + 0.2) ** 2 < 0.2).float()
picture = torch.stack([0.2 + 0.8 * disc, 0.5 + 0.2 * down, 0.6 - 0.4 * disc])

maps = NormAttribution(model).maps(picture[None])
scores = maps.encoder[:, -1, 0]  # what [CLS] takes up in the last layer
page = patches_page([picture], scores, maps.patches, maps=maps, method="norm", unit="norm")
page.save("patches.html")
""",
}


@dataclass(frozen=True)
class Shot:
    """A picture.

    Attributes:
        name: the name of its file.
        title: its heading.
        text: what it shows.
        command: what writes the file.
        file: the file: a page, or a picture.
        fragment: what the page's address says it shows.
        size: width and height of the window; the picture is no higher than the page.
        dark: whether the reader's system is dark.
    """

    name: str
    title: str
    text: str
    command: str
    file: str
    fragment: str = ""
    size: tuple[int, int] = (1080, 700)
    dark: bool = False


SENTENCE = "captum-norm explain 'A man is playing a guitar on stage.'"
SHOTS = (
    Shot(
        "maps",
        "Maps of layers and heads",
        "Norms beside attention weights in layer 4. By weight, every token looks at `[CLS]`; by norm, `[CLS]` hardly "
        "counts. Each small map is a head, which a click selects; the framed row is that of *guitar*.",
        f"{SENTENCE} --out guitar.html",
        "guitar.html",
        "views=maps&layer=4&pins=output:6",
        (1080, 1200),
    ),
    Shot(
        "text",
        "Text",
        "What *guitar* and *stage* receive, and the difference between them: point at a token, click to keep it "
        "selected, then click a second one.",
        f"{SENTENCE} --out guitar.html",
        "guitar.html",
        "views=text&layer=4&pins=output:6,output:8",
        (1080, 620),
    ),
    Shot(
        "links",
        "Links",
        "The strongest lines from keys to queries of two heads, each in a colour. Words over a column pick tokens.",
        f"{SENTENCE} --out guitar.html",
        "guitar.html",
        "views=links&layer=3&colored=11,2&lines=24",
        (1080, 760),
    ),
    Shot(
        "flow",
        "Flow",
        "How the rollout reaches an output: edges above a threshold lead from the tokens on the left through the "
        "layers.",
        f"{SENTENCE} --scope attn_res_ln --position 6 --out flow.html",
        "flow.html",
        "views=flow&flow=0.05",
        (1080, 760),
    ),
    Shot(
        "answer",
        "An answer and its passages",
        "What an answer rests on, by passage and by token; orange speaks against it. Click a token of the answer to "
        "see what it rests on.",
        "captum-norm explain prompt.txt --generate 20 --segments line --method decompx --out answer.html",
        "answer.html",
        "views=text,findings",
        (1080, 900),
    ),
    Shot(
        "components",
        "Inside the model",
        "Which heads and feed-forward networks turn *Paul* into *Jane*, and by which paths, if the text said that Jane "
        "hands the lamp. Click one to see at which token, to whose logits it adds, and what it reads.",
        "captum-norm explain 'While Paul and Jane were in the garden, Paul handed the lamp to' --model "
        "captum-norm/passages --target ' Jane' --against ' Paul' --counterfactual 'While Paul and Jane were in the "
        "garden, Jane handed the lamp to' --components heads,feed_forward,edges --method relp --out components.html",
        "components.html",
        size=(1080, 900),
    ),
    Shot(
        "compare",
        "Methods compared",
        "Scores of several methods on the same text, and how faithful each method is to the output.",
        "captum-norm compare sentences.txt --methods decompx,norm,weights,rollout,random --out comparison.html",
        "comparison.html",
        size=(1080, 1000),
    ),
    Shot(
        "analysis",
        "An analysis of a corpus",
        "Attention weight by category of token, from the report on a text.",
        "captum-norm analyze special-tokens --limit 40 --out study",
        "study/report.html",
        "views=figures",
        (1080, 900),
    ),
    Shot(
        "alignment",
        "Word alignment",
        "Links of a translation model's head, beside gold links.",
        "norm-align sweep --corpus alibi=blue-beard --no-gradients --bootstrap 0 --out sweep",
        "sweep/blue-beard.html",
        "views=links&layer=0&example=1",
        (1080, 900),
    ),
    Shot(
        "image",
        "Patches of a picture",
        "What `[CLS]` takes up from each patch, drawn over the picture. The model is untrained, and only shows the "
        "view.",
        "python patches.py",
        "patches.html",
        "views=picture&layer=1&pins=output:0",
        (1080, 1000),
    ),
    Shot(
        "dark",
        "In the dark",
        "Pages follow the colour scheme of the reader's system. Their address contains what is shown, so you can link "
        "to a finding.",
        f"{SENTENCE} --out guitar.html",
        "guitar.html",
        "views=text,links&layer=4&pins=output:6",
        (1080, 1010),
        dark=True,
    ),
    Shot(
        "phone",
        "On a phone",
        "The same page on a narrow screen.",
        f"{SENTENCE} --out guitar.html",
        "guitar.html",
        "views=text,maps&layer=4&pins=output:6",
        (390, 1300),
    ),
    Shot(
        "demo",
        "A figure",
        "All commands also write figures for print.",
        "captum-norm demo --out demo.png",
        "demo.png",
    ),
)


def run(command: str) -> None:
    """Run one of our programs, silently.

    Raises:
        RuntimeError: it fails.
    """
    program, *arguments = shlex.split(command)
    with redirect_stdout(io.StringIO()), patch.object(sys, "argv", [program, *arguments]):  # which reports repeat
        code = PROGRAMS[program](arguments)
    if code:
        raise RuntimeError(f"{command} ended with {code}")


def compressed(picture: bytes) -> bytes:
    """Return a picture with few colours, which is what pages have, as PNG.

    Raises:
        ValueError: it is still too large.
    """
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.thumbnail((1400, 1400))
    written = io.BytesIO()
    image.quantize(COLORS, dither=Image.Dither.NONE).save(written, format="PNG", optimize=True)
    if len(written.getvalue()) > MOST_BYTES:
        raise ValueError(f"the picture has {len(written.getvalue())} bytes, more than {MOST_BYTES}")
    return written.getvalue()


def take(shots: list[Shot]) -> dict[str, bytes]:
    """Run the commands in a folder of their own, and take the pictures."""
    pictures = {}
    with tempfile.TemporaryDirectory() as folder, chdir(folder), started() as browser:
        if browser is None:
            raise RuntimeError("there is no Chromium")
        for name, text in FILES.items():
            Path(name).write_text(text, encoding="utf-8")
        for command in dict.fromkeys(shot.command for shot in shots):
            run(command)
        for shot in shots:
            if shot.file.endswith(".png"):
                pictures[shot.name] = compressed(Path(shot.file).read_bytes())
                continue
            width, height = shot.size
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme="dark" if shot.dark else "light"
            )
            tab = context.new_page()
            tab.goto(f"{Path(shot.file).resolve().as_uri()}#{shot.fragment}")
            tab.wait_for_timeout(1000)  # until what is drawn lazily is drawn
            end = tab.evaluate("Math.ceil(document.body.getBoundingClientRect().bottom)")
            clip = {"x": 0.0, "y": 0.0, "width": float(width), "height": float(min(height, end))}
            pictures[shot.name] = compressed(tab.screenshot(clip=clip, full_page=True))  # type: ignore[arg-type]
            context.close()
    return pictures


def gallery() -> str:
    """Return the page that shows all pictures, each with its command."""
    parts = [INTRODUCTION]
    for shot in SHOTS:
        address = f" Address: `{shot.file}#{shot.fragment}`." if shot.fragment else ""
        parts.append(
            f"## {shot.title}\n\n{shot.text}{address}\n\n![{shot.title}](_static/gallery/{shot.name}.png)\n\n"
            f"```console\n$ {shot.command}\n```\n"
        )
        parts += [f"```python\n{FILES[name]}```\n" for name in shot.command.split() if name.endswith(".py")]
    return "\n".join(parts)


def main() -> None:
    """Take the pictures and write the page."""
    parser = argparse.ArgumentParser(description="Make the pictures of the documentation.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these pictures (default: all)")
    names: list[str] = parser.parse_args().names
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    pictures = take([shot for shot in SHOTS if not names or shot.name in names])
    FOLDER.mkdir(exist_ok=True)
    for name, picture in pictures.items():
        (FOLDER / f"{name}.png").write_bytes(picture)
    (DOCS / "gallery.md").write_text(gallery(), encoding="utf-8")


if __name__ == "__main__":
    main()
