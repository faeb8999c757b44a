"""A small causal language model to explain, trained on plain text.

```console
$ python -m benchmarks.language_model --text train.en.xz wikitext.txt --out build/language-model
```

Trains a byte-level BPE vocabulary and a GPT-2, in bfloat16 (autocast), on packed sentences, each after a start token.
Writes a ``save_pretrained`` folder after every tenth of the steps. Every random choice follows from ``--seed``.
"""

import argparse
import lzma
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

START = "<s>"


def lines(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the non-empty lines of plain or xz-compressed files."""
    for path in paths:
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
            yield from (line.strip() for line in file if line.strip())


def trained_tokenizer(text: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[START], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    special = {"bos_token": START, "eos_token": START, "pad_token": START}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)  # type: ignore[no-untyped-call]


def packed(text: Sequence[str], tokenizer: PreTrainedTokenizerFast, length: int) -> Tensor:
    """Return all tokens, each line's after a start token, cut into rows: (N, length)."""
    start = tokenizer.convert_tokens_to_ids(START)
    parts = [text[i : i + 10_000] for i in range(0, len(text), 10_000)]
    ids = [token for part in parts for line in tokenizer(list(part))["input_ids"] for token in (start, *line)]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


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
    steps: int = 3_000,
    size: int = 32,
    vocabulary: int = 8_000,
    width: int = 256,
    layers: int = 4,
    learning_rate: float = 2e-3,
    seed: int = 1,
) -> None:
    """Train one model and its vocabulary."""
    torch.manual_seed(seed)

    text = list(lines(files))
    order = torch.randperm(len(text)).tolist()
    text = [text[index] for index in order]
    tokenizer = trained_tokenizer(text, vocabulary)
    rows = packed(text, tokenizer, 128)
    held_out, rows = rows[:200], rows[200:]
    print(f"{len(text):,} lines, {rows.numel():,} tokens", flush=True)

    start = tokenizer.bos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=128, n_embd=width, n_layer=layers,
        n_head=width // 64, bos_token_id=start, eos_token_id=start, pad_token_id=start,
        embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / 200, 1 - step / steps))
    begun, losses = time.perf_counter(), []
    for step in range(steps):
        model.train()
        first = step * size % (len(rows) - size)
        part = rows[first : first + size]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=part, labels=part).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0 or step == 9:
            rate = (step + 1) * part.numel() / (time.perf_counter() - begun)
            print(f"step {step + 1}: loss {sum(losses) / len(losses):.3f}, {rate:,.0f} tokens/s", flush=True)
            losses = []
        if (step + 1) % (steps // 10) == 0:
            print(f"step {step + 1}: perplexity {perplexity(model, held_out, 50):.1f}", flush=True)
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)


def main() -> None:
    """Train one model."""
    parser = argparse.ArgumentParser(description="Train a small causal language model on the CPU.")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="files, one sentence or paragraph a line")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--batch", type=int, default=32, help="rows of 128 tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    train(arguments.text, arguments.out, steps=arguments.steps, size=arguments.batch, seed=arguments.seed)


if __name__ == "__main__":
    main()
