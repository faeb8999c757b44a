"""A sentiment classifier to explain: the encoder of the demo, fine-tuned on SST-2.

```console
$ python -m benchmarks.sentiment --data DIR --out build/sentiment
```

``DIR`` holds ``train.tsv`` and ``dev.tsv``, lines of a sentence, a tab and 0 or 1. Writes a ``save_pretrained``
folder. Every random choice follows from ``--seed``.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from captum_norm.loading import DEFAULT_MODEL, load

Example = tuple[str, int]
LABELS = {0: "negative", 1: "positive"}


def read(path: Path) -> list[Example]:
    """Return sentences and labels."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(sentence, int(label)) for sentence, _, label in (line.rpartition("\t") for line in lines)]


def batches(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, size: int
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Return the tokenizer's output and labels (B,), in the order given."""
    for start in range(0, len(examples), size):
        sentences, labels = zip(*examples[start : start + size], strict=True)
        yield tokenizer(list(sentences), padding=True, truncation=True, return_tensors="pt"), torch.tensor(labels)


def shuffled(examples: Sequence[Example], size: int) -> list[Example]:
    """Shuffle, keeping examples of similar length together to save padding."""
    drawn = [examples[index] for index in torch.randperm(len(examples)).tolist()]
    pools = [sorted(drawn[i : i + 50 * size], key=lambda pair: len(pair[0])) for i in range(0, len(drawn), 50 * size)]
    parts = [pool[i : i + size] for pool in pools for i in range(0, len(pool), size)]
    return [example for index in torch.randperm(len(parts)).tolist() for example in parts[index]]


@torch.no_grad()
def accuracy(model: Any, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> float:
    """Return the share of examples that the model labels correctly."""
    model.eval()
    right = [
        model(**inputs).logits.argmax(-1).eq(labels).float() for inputs, labels in batches(examples, tokenizer, 64)
    ]
    return float(torch.cat(right).mean())


def train(
    data: Path, out: Path, *, epochs: int = 4, size: int = 32, learning_rate: float = 1e-4, seed: int = 1
) -> None:
    """Fine-tune, and keep the model of the epoch with the best accuracy on the development set."""
    torch.manual_seed(seed)
    training, development = read(data / "train.tsv"), read(data / "dev.tsv")
    encoder, tokenizer = load()
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        encoder.config._name_or_path, id2label=LABELS, label2id={name: label for label, name in LABELS.items()}
    )
    steps = epochs * -(-len(training) // size)
    optimizer = AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)
    best = 0.0
    for epoch in range(1, epochs + 1):
        start, losses = time.perf_counter(), []
        model.train()
        for inputs, labels in batches(shuffled(training, size), tokenizer, size):
            loss = model(**inputs, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        reached = accuracy(model, tokenizer, development)
        seconds = time.perf_counter() - start
        mean = sum(losses) / len(losses)
        print(f"epoch {epoch}: loss {mean:.4f}, development accuracy {reached:.2%}, {seconds:.0f} s", flush=True)
        if reached > best:
            best = reached
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)


def main() -> None:
    """Train one classifier."""
    parser = argparse.ArgumentParser(description=f"Fine-tune {DEFAULT_MODEL} on SST-2.")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tsv and dev.tsv")
    parser.add_argument("--out", type=Path, required=True, help="folder of the classifier")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    train(
        arguments.data,
        arguments.out,
        epochs=arguments.epochs,
        size=arguments.batch,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
    )


if __name__ == "__main__":
    main()
