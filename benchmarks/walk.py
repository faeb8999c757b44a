"""How much code a reader of one call must follow: ``python -m benchmarks.walk``.

For a warm call on a two-layer model: the files of the package entered, the changes from one to another, and the maximum
call depth. Captum's integrated gradients, in Captum's files, are measured for comparison.
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
    """The path of one call through the files of a folder.

    Attributes:
        folder: whose files count.
        files: those entered.
        changes: how often the called function is in another file than the one called before it.
        depth: the maximum number of their functions on the stack.
    """

    folder: str
    files: set[str] = field(default_factory=set)
    changes: int = 0
    depth: int = 0
    _last: str = ""
    _open: int = 0

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """Count a call or return; the profiler's callback."""
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
    """Record what this thread calls inside the context."""
    sys.setprofile(walk.see)
    try:
        yield
    finally:
        sys.setprofile(None)


def walk_of(call: Callable[[], object], package: Any = captum_norm) -> Walk:
    """Return the path of a call through a package, after a first call."""
    call()
    walk = Walk(str(Path(package.__file__).parent))
    with walking(walk):
        call()
    return walk


def calls() -> Iterator[tuple[str, Callable[[], object], Any]]:
    """Yield what to measure: name, call and package."""
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
    """Measure every call and print a table."""
    table = Table("a warm call", "files", "changes of file", "depth")
    for name, call, package in calls():
        walk = walk_of(call, package)
        table.add_row(name, *(str(number) for number in (len(walk.files), walk.changes, walk.depth)))
    Console().print(table)


if __name__ == "__main__":
    main()
