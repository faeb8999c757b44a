r"""A small causal language model to explain, trained on plain text and on generated questions about passages.

```console
$ python -m benchmarks.language_model --text train.en.xz wikitext.txt --out build/language-model --device cuda
```

Trains a byte-level BPE vocabulary and a GPT-2, in bfloat16 (autocast), on packed sentences, each after a start token;
a quarter of the rows are documents of :mod:`benchmarks.copied_facts`, which teach it to answer from its context. Writes
a ``save_pretrained`` folder after every tenth of the steps. Every random choice follows from ``--seed``. Without text,
the documents alone teach a small model; the one that captum-norm comes with, ``captum-norm/passages``, was made by

```console
$ python -m benchmarks.language_model --width 192 --heads 6 --layers 6 --vocabulary 1000 --questions 30 \
    --either --dropout 0 --steps 4000 --out build/passages --device cuda
```
"""

import argparse
import itertools
import lzma
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from benchmarks.copied_facts import training_documents

START = "<s>"
HELD_OUT = 100
"""Rows of each kind of text that perplexity is measured on."""


def lines(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the non-empty lines of plain or xz-compressed files."""
    for path in paths:
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
            yield from (line.strip() for line in file if line.strip())


def trained_tokenizer(text: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the text, which begins each text with the start token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[START], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", pair=f"{START} $A $B", special_tokens=[(START, tokenizer.token_to_id(START))]
    )
    special = {"bos_token": START, "eos_token": START, "pad_token": START}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)  # type: ignore[no-untyped-call]


def packed(text: Sequence[str], tokenizer: PreTrainedTokenizerFast, length: int) -> Tensor:
    """Return all tokens, cut into rows: (N, length)."""
    parts = [list(text[first : first + 10_000]) for first in range(0, len(text), 10_000)]
    ids = [token for part in parts for line in tokenizer(part)["input_ids"] for token in line]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def documents(generated: Iterable[str], tokenizer: PreTrainedTokenizerFast, length: int) -> Tensor:
    """Return generated documents, one a row, each continued by the next one's beginning: (N, length)."""
    ids = tokenizer(list(generated))["input_ids"]
    rows = [(this + after)[:length] for this, after in itertools.pairwise(ids)]
    return torch.tensor([row for row in rows if len(row) == length])


@torch.no_grad()
def perplexity(model: GPT2LMHeadModel, rows: Tensor, size: int) -> float:
    """Of the tokens of held-out rows."""
    model.train(False)
    losses = [float(model(input_ids=part, labels=part).loss) * len(part) for part in rows.split(size)]
    return math.exp(sum(losses) / len(rows))


def train(
    files: Sequence[Path],
    out: Path,
    *,
    steps: int = 9_000,
    size: int = 64,
    vocabulary: int = 10_000,
    width: int = 384,
    heads: int = 6,
    layers: int = 8,
    length: int = 512,
    dropout: float = 0.1,
    questions: int = 8,
    either: bool = False,
    learning_rate: float = 1.5e-3,
    seed: int = 1,
    device: str = "cpu",
) -> None:
    """Train one model and its vocabulary."""
    torch.manual_seed(seed)

    text = list(lines(files))
    order = torch.randperm(len(text)).tolist()
    text = [text[index] for index in order]
    tokenizer = trained_tokenizer([*text, *training_documents(len(text) // 100 or 5_000, seed)], vocabulary)
    rows = packed(text, tokenizer, length)
    generated = training_documents(len(rows) or 50_000, seed, questions, either=either)
    asked = documents(generated, tokenizer, length)
    print(f"{len(text):,} lines, {rows.numel():,} tokens; {asked.numel():,} generated tokens", flush=True)
    kinds = {"text": (rows.to(device), size - size // 4), "generated text": (asked.to(device), size // 4)}
    if not text:
        kinds = {"generated text": (asked.to(device), size)}

    start = tokenizer.bos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=length, n_embd=width, n_layer=layers,
        n_head=heads, bos_token_id=start, eos_token_id=start, pad_token_id=start,
        embd_pdrop=dropout, resid_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    nn.Module.to(model, torch.device(device))
    optimizer = AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / 200, 1 - step / steps))
    begun, losses = time.perf_counter(), []
    for step in range(steps):
        model.train()
        part = torch.cat([_batch(rows[HELD_OUT:], step, count) for rows, count in kinds.values()])
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=part, labels=part).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if (step + 1) % 100 == 0 or step == 9:
            rate = (step + 1) * part.numel() / (time.perf_counter() - begun)
            print(f"step {step + 1}: loss {float(sum(losses)) / len(losses):.3f}, {rate:,.0f} tokens/s", flush=True)
            losses = []
        if (step + 1) % (steps // 10) == 0:
            for kind, (rows, _) in kinds.items():
                print(f"step {step + 1}: perplexity {perplexity(model, rows[:HELD_OUT], 25):.2f} of {kind}", flush=True)
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)


def _batch(rows: Tensor, step: int, size: int) -> Tensor:
    """Return one step's rows, in another order in each epoch."""
    epoch, index = divmod(step, len(rows) // size)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
    return rows[order[index * size : (index + 1) * size].to(rows.device)]


def main() -> None:
    """Train one model."""
    parser = argparse.ArgumentParser(description="Train a small causal language model.")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="files, one sentence or paragraph a line")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--steps", type=int, default=9_000, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=64, help="rows of 512 tokens (default: %(default)s)")
    for name, default in (
        ("vocabulary", 10_000),
        ("width", 384),
        ("heads", 6),
        ("layers", 8),
        ("questions", 8),
        ("seed", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument(
        "--device", default="cpu", help="minutes on a large GPU, days on two cores (default: %(default)s)"
    )
    parser.add_argument("--either", action="store_true", help="either of two people receives, not by their order")
    parser.add_argument("--dropout", type=float, default=0.1, help="default: %(default)s")
    given = vars(parser.parse_args())
    train(given.pop("text"), given.pop("out"), size=given.pop("batch"), **given)


if __name__ == "__main__":
    main()
