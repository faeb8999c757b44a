r"""A small causal language model that answers the prompts of :mod:`captum_norm.lab.prompts`, of up to 16,384 tokens.

```console
$ python -m benchmarks.context_model --out build/contexts --device cuda
```

Trains a byte-level BPE vocabulary and a LLaMA on passages of all kinds and questions about them, in bfloat16
(autocast), in stages of growing length. Every random choice follows from ``--seed``. Prints how many prompts of each
kind and length it answers word for word.
"""

import argparse
import itertools
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.language_model import trained_tokenizer
from captum_norm.lab.prompts import KINDS, evidence_prompts, told


class Stage(NamedTuple):
    """A part of the training: the length of rows, how many make a step, and how many steps.

    ``again`` asks questions several times, which teaches to copy; ``elsewhere`` is the weight in the loss of tokens
    that are in no answer: what passages say is drawn at random.
    """

    length: int
    size: int
    steps: int
    again: bool = False
    elsewhere: float = 0.1


STAGES = (
    Stage(512, 64, 2_500, again=True, elsewhere=1.0),
    Stage(1024, 32, 3_500),
    Stage(4096, 8, 1_500),
    Stage(16_384, 2, 1_500),
)
PASSAGE = 18
"""Tokens of a passage, about."""
LENGTHS = (10, 20, 50, 200, 700)
"""Numbers of passages that are asked about."""


def document(draw: random.Random, length: int, *, again: bool) -> tuple[str, list[tuple[int, int]]]:
    """Draw passages and questions with their answers, about so many tokens; and where the answers are."""
    share = draw.uniform(0.15, 0.5) if again else draw.uniform(0.4, 0.8)
    passages, questions = told(draw, KINDS, max(5, round(length * share / PASSAGE)))
    text, spans = "\n".join(passages), list[tuple[int, int]]()
    count = round(length / PASSAGE * 1.2) - len(passages)
    for question in draw.choices(questions, k=count) if again else draw.sample(questions, len(questions)):
        text += f"\n{question.text}"
        spans.append((len(text), len(text) + len(question.answer)))
        text += question.answer
    return text, spans


def rows(tokenizer: PreTrainedTokenizerFast, stage: Stage, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return documents, each continued by the next one's beginning, (N, length) ids; and which are in answers."""
    draw, length, ids, answers = random.Random(seed), stage.length, list[int](), list[bool]()
    row, inside = list[int](), list[bool]()
    while len(ids) < length * count:
        text, spans = document(draw, length, again=stage.again)
        encoded: Any = tokenizer(text, return_offsets_mapping=True)
        at = 0
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            while at < len(spans) and spans[at][1] <= start:
                at += 1
            row.append(token)
            inside.append(at < len(spans) and end > spans[at][0] and end > start)
        if len(row) >= length:
            ids += row[:length]
            answers += inside[:length]
            row, inside = [], []
    return torch.tensor(ids, dtype=torch.int16).view(-1, length), torch.tensor(answers).view(-1, length)


def all_rows(tokenizer: PreTrainedTokenizerFast, epochs: int, seed: int, workers: int) -> list[tuple[Tensor, Tensor]]:
    """Make the rows of all stages in several processes."""
    made = []
    with ProcessPoolExecutor(workers) as pool:
        for number, stage in enumerate(STAGES):
            each = -(-stage.size * stage.steps // epochs // workers)
            seeds = [1_000 * (10 * seed + number) + worker for worker in range(workers)]
            made.append([pool.submit(rows, tokenizer, stage, each, seed) for seed in seeds])
        parts = [zip(*(part.result() for part in parts), strict=True) for parts in made]
        return [(torch.cat(ids), torch.cat(answers)) for ids, answers in parts]


def train(
    out: Path,
    *,
    device: str,
    seed: int,
    width: int,
    layers: int,
    heads: int,
    vocabulary: int,
    epochs: int,
    workers: int,
) -> None:
    """Train a model and its vocabulary."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    tokenizer = trained_tokenizer([document(draw, 1024, again=False)[0] for _ in range(2_000)], vocabulary)
    start = tokenizer.bos_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=heads, max_position_embeddings=STAGES[-1].length,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True, bos_token_id=start, eos_token_id=start, pad_token_id=start,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    parameters = sum(each.numel() for each in model.parameters())
    begun = time.perf_counter()
    made = all_rows(tokenizer, epochs, seed, workers)
    tokens = sum(ids.numel() for ids, _ in made)
    print(f"{parameters:,} parameters; {tokens:,} tokens in {time.perf_counter() - begun:.0f} s", flush=True)
    nn.Module.to(model, torch.device(device))
    every = sum(stage.steps for stage in STAGES)
    optimizer = AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / 200, 1.05 - step / every))
    for stage, parts in zip(STAGES, made, strict=True):
        ids, answers = (part.to(device) for part in parts)
        begun, losses = time.perf_counter(), []
        for step, part in enumerate(itertools.islice(_batches(len(ids), stage.size), stage.steps)):
            model.train()
            row, inside = ids[part.to(device)].long(), answers[part.to(device), 1:]
            with torch.autocast(device, torch.bfloat16):
                logits = model(input_ids=row, use_cache=False).logits[:, :-1]
            each = cross_entropy(logits.flatten(0, 1).float(), row[:, 1:].flatten(), reduction="none").view_as(inside)
            weights = torch.where(inside, 1.0, stage.elsewhere)
            loss = (each * weights).sum() / weights.sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append((each.detach() * inside).sum() / inside.sum())
            if (step + 1) % 100 == 0:
                rate = (step + 1) * row.numel() / (time.perf_counter() - begun)
                mean = float(sum(losses)) / len(losses)
                print(f"{stage.length}, {step + 1}: loss of answers {mean:.3f}, {rate:,.0f} tokens/s", flush=True)
                losses = []
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        for line in answered(model.train(False), tokenizer, [n for n in LENGTHS if n * PASSAGE < stage.length]):
            print(line, flush=True)


def _batches(count: int, size: int) -> Iterator[Tensor]:
    for epoch in itertools.count():
        yield from torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).split(size)


@torch.no_grad()
def answered(model: Any, tokenizer: PreTrainedTokenizerFast, lengths: list[int], count: int = 20) -> Iterator[str]:
    """Yield for each kind the share of prompts that are answered word for word, by the number of passages."""
    for kind in KINDS:
        shares = []
        for passages in lengths:
            right = 0
            for prompt in evidence_prompts(kind, count, seed=1, passages=passages):
                before = len(tokenizer(prompt.text)["input_ids"])
                ids = torch.tensor([tokenizer(prompt.text + prompt.answer)["input_ids"]], device=model.device)
                with torch.autocast(model.device.type, torch.bfloat16):
                    logits = model(ids[:, :-1], use_cache=False, logits_to_keep=ids.shape[1] - before).logits
                right += bool((logits[0].argmax(-1) == ids[0, before:]).all())
            shares.append(f"{passages}: {right / count:.0%}")
        yield f"{kind}: " + ", ".join(shares)


def main() -> None:
    """Train one model."""
    parser = argparse.ArgumentParser(description="Train a small language model that answers from long contexts.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--device", default="cpu", help="minutes on a large GPU (default: %(default)s)")
    for name, default in (
        ("seed", 1), ("width", 256), ("layers", 6), ("heads", 8), ("vocabulary", 1000), ("epochs", 5), ("workers", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    given = vars(parser.parse_args())
    train(given.pop("out"), **given)


if __name__ == "__main__":
    main()
