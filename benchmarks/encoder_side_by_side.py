"""Encoder alignment beside the released code of SimAlign and awesome-align, on BERTs of random weights.

``python -m benchmarks.encoder_side_by_side SIMALIGN AWESOME_ALIGN``, the folders of copies of
https://github.com/cisnlp/simalign and https://github.com/neulab/awesome-align, which are imported from there; they need
boto3, networkx, requests and scikit-learn. Their links and ours are compared in float64, pair by pair. Then pairs per
second are measured in float32: SimAlign takes one pair at a time, awesome-align 32 in the order of the text, without
the layers above the one that it reads, we batches of similar lengths.
"""

import argparse
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

from alignment import Alignment, EncoderAligner, HuggingFaceTokenizer, read_pharaoh

LAYER = 8
"""The layer as SimAlign and awesome-align count, from the embeddings."""

Pairs = list[tuple[list[str], list[str]]]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model."""

    width: int
    layers: int
    heads: int

    def __str__(self) -> str:
        return f"{self.layers} layers of width {self.width}"


SMALL, MBERT = Sizes(64, 10, 4), Sizes(768, 12, 12)


def save_model(folder: Path, seed: int, sizes: Sizes, device: str = "cpu") -> tuple[Any, BertTokenizer]:
    """Save a model of random weights, whose tokenizer cuts words into one to three pieces, as all three read it."""
    syllables = ["".join(letters) for letters in product("bdgklmnprstv", "aeiou")]
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        ".",
        ",",
        *syllables,
        *(f"##{one}" for one in syllables),
    ]
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    tokenizer = BertTokenizer(vocab={piece: index for index, piece in enumerate(vocabulary)}, do_lower_case=False)
    torch.manual_seed(seed)
    numbers: dict[str, Any] = {
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
    }
    config = BertConfig(vocab_size=len(vocabulary), intermediate_size=4 * sizes.width, initializer_range=0.1, **numbers)
    model: Any = BertForMaskedLM(config).train(False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.to(device), tokenizer


def sentence_pairs(seed: int, count: int) -> Pairs:
    """Sentences of 1 to 40 words of one to three syllables, as long as Europarl's on average."""
    draw = random.Random(seed)

    def words() -> list[str]:
        syllables = ["".join(draw.choices("bdgklmnprstv", k=1) + draw.choices("aeiou", k=1)) for _ in range(90)]
        length = min(40, max(1, round(draw.lognormvariate(2.9, 0.6))))
        return ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(length - 1)] + ["."]

    return [(words(), words()) for _ in range(count)]


class SimAlign:
    """SimAlign's own code."""

    def __init__(self, code: Path, folder: Path, dtype: torch.dtype, device: str, methods: str = "ai") -> None:
        with imported_from(code):
            made: Any = import_module("simalign.simalign").SentenceAligner
        self.aligner = made(str(folder), "bpe", matching_methods=methods, device=device, layer=LAYER)
        self.aligner.embed_loader.emb_model.to(dtype)

    def __call__(self, pairs: Pairs) -> dict[str, list[Alignment]]:
        """The links of each pair by recipe, one pair at a time."""
        links = [self.aligner.get_word_aligns(*pair) for pair in pairs]
        names = {"inter": "argmax", "itermax": "itermax"}
        return {names[name]: [Alignment(pair[name]) for pair in links] for name in links[0]}


class AwesomeAlign:
    """awesome-align's own code."""

    def __init__(self, code: Path, folder: Path, dtype: torch.dtype, device: str, model: BertForMaskedLM) -> None:
        with imported_from(code):
            self.run: Any = import_module("run_align")
            modeling: Any = import_module("awesome_align.modeling")
        self.tokenizer = self.run.BertTokenizer(str(folder / "vocab.txt"), do_lower_case=False)
        modeling.PAD_ID, modeling.CLS_ID, modeling.SEP_ID = (
            self.tokenizer.pad_token_id,
            self.tokenizer.cls_token_id,
            self.tokenizer.sep_token_id,
        )
        self.model = self.run.BertForMaskedLM(self.run.BertConfig(**model.config.to_dict()))
        unread = self.model.load_state_dict(model.state_dict(), strict=False).missing_keys
        assert not [name for name in unread if name.startswith("bert.")], unread
        self.model.to(device, dtype)
        self.device = torch.device(device)

    def __call__(self, pairs: Pairs) -> dict[str, list[Alignment]]:
        """The links of each pair, by its command's function."""
        with TemporaryDirectory() as folder:
            text, links = Path(folder, "text"), Path(folder, "links")
            lines = [f"{' '.join(source)} ||| {' '.join(target)}\n" for source, target in pairs]
            text.write_text("".join(lines), encoding="utf-8")
            options = {"data_file": str(text), "output_file": str(links), "num_workers": 0, "batch_size": 32}
            options |= {"output_prob_file": None, "output_word_file": None, "device": self.device}
            options |= {"align_layer": LAYER, "extraction": "softmax", "softmax_threshold": 0.001}
            self.run.word_align(argparse.Namespace(**options), self.model, self.tokenizer)
            return {"softmax": list(read_pharaoh(links))}


@contextmanager
def imported_from(code: Path) -> Iterator[None]:
    """Import from a folder."""
    sys.path.insert(0, str(code))
    try:
        yield
    finally:
        sys.path.remove(str(code))


def ours(model: Any, tokenizer: BertTokenizer, recipe: str) -> Callable[[Pairs], Sequence[Alignment]]:
    """Align with the same layer."""
    aligner = EncoderAligner(model, HuggingFaceTokenizer(tokenizer), LAYER - 1, recipe=recipe)
    return lambda pairs: aligner.align(*map(list, zip(*pairs, strict=True)))


def identical(codes: tuple[Path, Path], seeds: int, count: int) -> Table:
    """Compare links, pair by pair."""
    table = Table("seed", "recipe", "pairs", "links", "pairs that differ", title=f"Float64, {SMALL}")
    for seed in range(seeds):
        with TemporaryDirectory() as name:
            folder = Path(name)
            model, tokenizer = save_model(folder, seed, SMALL)
            pairs, model = sentence_pairs(seed, count), model.double()
            theirs = SimAlign(codes[0], folder, torch.float64, "cpu")(pairs)
            theirs |= AwesomeAlign(codes[1], folder, torch.float64, "cpu", model)(pairs)
            for recipe, expected in theirs.items():
                found = ours(model, tokenizer, recipe)(pairs)
                differ = sum(one != other for one, other in zip(found, expected, strict=True))
                table.add_row(str(seed), recipe, str(count), f"{sum(map(len, found)):,}", str(differ))
    return table


def rates(codes: tuple[Path, Path], sizes: Sizes, count: int, device: str) -> Table:
    """Measure pairs per second."""
    table = Table("code", "recipe", "pairs per second", "×", title=f"Float32 on {device}, {sizes}, {count} pairs")
    with TemporaryDirectory() as name:
        folder = Path(name)
        model, tokenizer = save_model(folder, 0, sizes, device)
        pairs = sentence_pairs(1, count)
        runs: dict[tuple[str, str], Callable[[Pairs], Any]] = {
            ("SimAlign", "argmax"): SimAlign(codes[0], folder, torch.float32, device, "a"),
            ("SimAlign", "itermax"): SimAlign(codes[0], folder, torch.float32, device, "i"),
            ("awesome-align", "softmax"): AwesomeAlign(codes[1], folder, torch.float32, device, model),
        }
        runs |= {
            ("captum-norm", recipe): ours(model, tokenizer, recipe)
            for recipe in ("argmax", "itermax", "softmax", "hmm")
        }
        base = 0.0
        for (code, recipe), run in runs.items():
            run(pairs[:8])
            start = perf_counter()
            run(pairs)
            rate = count / (perf_counter() - start)
            base = base or rate
            table.add_row(code, recipe, f"{rate:.1f}", f"{rate / base:.1f}")
    return table


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoder_side_by_side", description=__doc__)
    parser.add_argument("simalign", type=Path)
    parser.add_argument("awesome_align", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--timed", type=int, default=200, help="pairs of the measurement of speed; 0 for none")
    parser.add_argument("--sizes", choices=["small", "mbert"], default="mbert")
    parser.add_argument("--device", default="cpu", help="where speed is measured")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    codes = options.simalign, options.awesome_align
    if options.seeds:
        Console().print(identical(codes, options.seeds, options.pairs))
    if options.timed:
        Console().print(rates(codes, SMALL if options.sizes == "small" else MBERT, options.timed, options.device))


if __name__ == "__main__":
    main()
