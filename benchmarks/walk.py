"""How far a reader walks along one call: ``python -m benchmarks.walk``.

For a warm call on a model of two layers: how many files of the package it enters, how often it goes on in another one
of them, and how many of their functions are open at most. Captum's integrated gradients stand beside, in files of
Captum.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import captum
import torch
from captum.attr import IntegratedGradients
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaModel

import captum_norm
from captum_norm import AttentionBlockAttribution, DecompX, NormAttribution

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@dataclass
class Walk:
    """The way of one call through the files of a folder.

    Attributes:
        folder: whose files count.
        files: those that were entered.
        changes: how often a function was called that stands in another one than the function called before it.
        depth: how many functions of theirs were open at most.
    """

    folder: str
    files: set[str] = field(default_factory=set)
    changes: int = 0
    depth: int = 0
    _last: str = ""
    _open: int = 0

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """What the interpreter tells of each function that begins or ends."""
        name = frame.f_code.co_filename
        if event not in ("call", "return") or not name.startswith(self.folder):
            return
        if event == "call":
            self.files.add(name)
            self.changes += name != self._last
            self._last = name
            self._open += 1
            self.depth = max(self.depth, self._open)
        else:
            self._open -= 1


@contextmanager
def walking(walk: Walk) -> Iterator[None]:
    """While open, what this thread calls is seen."""
    sys.setprofile(walk.see)
    try:
        yield
    finally:
        sys.setprofile(None)


def walk_of(call: Callable[[], object], package: Any = captum_norm) -> Walk:
    """The way of a call through a package, when it has been called before."""
    call()
    walk = Walk(str(Path(package.__file__).parent))
    with walking(walk):
        call()
    return walk


def calls() -> Iterator[tuple[str, Callable[[], object], Any]]:
    """What is measured: its name, the call, and in whose files."""
    torch.manual_seed(0)
    ids: Tensor = torch.randint(1, 60, (1, 12))
    classifier: Any = BertForSequenceClassification(BertConfig(**SIZES | {"num_labels": 3}))
    classifier.eval()
    norms, decompx = NormAttribution(classifier.bert), DecompX(classifier)
    block = AttentionBlockAttribution(LlamaModel(LlamaConfig(**SIZES)), "atb_ff_res")
    gradients: Any = IntegratedGradients(lambda vectors: classifier(inputs_embeds=vectors).logits)
    vectors = classifier.get_input_embeddings()(ids).detach()
    yield "NormAttribution.attribute, BERT", lambda: norms.attribute(ids), captum_norm
    yield "atb_ff_res, LLaMA", lambda: block.attribute(ids), captum_norm
    yield "DecompX to a logit, BERT", lambda: decompx.attribute(ids, target=1), captum_norm
    yield "IntegratedGradients of Captum, BERT", lambda: gradients.attribute(vectors, target=1), captum


def main() -> None:
    """Walk, and print how far."""
    table = Table("a warm call", "files", "changes of file", "depth")
    for name, call, package in calls():
        walk = walk_of(call, package)
        table.add_row(name, *(str(number) for number in (len(walk.files), walk.changes, walk.depth)))
    Console().print(table)


if __name__ == "__main__":
    main()
