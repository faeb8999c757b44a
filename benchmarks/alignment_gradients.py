"""The cost of the gradient baselines relative to loops of backward passes; part of ``benchmarks.alignment``."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad
from transformers import MarianConfig, MarianMTModel

from alignment.gradients import source_gradients

Batch = tuple[Mapping[str, Any], Tensor]
SAMPLED = 4


def compare(model: Any, batches: Sequence[Batch], repeats: int = 5) -> dict[str, float]:
    """Return the median seconds of each implementation of saliency, for every target piece of some batches.

    Args:
        model: a sequence-to-sequence model of Hugging Face, in evaluation mode.
        batches: inputs and labels, as ``source_gradients`` takes them.
        repeats: timings of each implementation, taken alternately after a warm-up.

    Returns:
        By way. Loops over words are timed on a few words, or a few sentences, of each batch and scaled up.
    """
    ways: dict[str, Callable[[Any, Mapping[str, Any], Tensor], float]] = {
        "a pass for each word, in the batch": words_in_batch,
        "a pass for each word, sentences alone": words_of_sentences,
        "a pass for each position": positions,
        "source_gradients": source_gradients_seconds,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats + 1):
        for way, seconds in ways.items():
            times[way].append(sum(seconds(model, inputs, labels) for inputs, labels in batches))
    return {way: median(taken[1:]) for way, taken in times.items()}


def words_in_batch(model: Any, inputs: Mapping[str, Any], labels: Tensor) -> float:
    """Time one backward pass of the batch per word, for a few words spread over the batch."""
    start = perf_counter()
    embedded, log_p = log_probabilities(model, inputs, labels)
    forward = perf_counter() - start
    words = (labels != -100).nonzero().tolist()
    sampled = words[:: -(-len(words) // SAMPLED)]
    start = perf_counter()
    for row, step in sampled:
        grad(log_p[row, step], embedded, retain_graph=True)[0][row].norm(dim=-1)
    return forward + (perf_counter() - start) * len(words) / len(sampled)


def words_of_sentences(model: Any, inputs: Mapping[str, Any], labels: Tensor) -> float:
    """Time one backward pass per word, each sentence alone without padding, for a few sentences."""
    sources, targets = inputs["attention_mask"].sum(1).tolist(), (labels != -100).sum(1).tolist()
    sampled = range(0, len(labels), -(-len(labels) // SAMPLED))
    start = perf_counter()
    for row in sampled:
        one = {
            name: ids[row : row + 1, : targets[row] if name.startswith("decoder") else sources[row]]
            for name, ids in inputs.items()
            if isinstance(ids, Tensor)
        }
        embedded, log_p = log_probabilities(model, one, labels[row : row + 1, : targets[row]])
        for word in log_p[0]:
            grad(word, embedded, retain_graph=True)[0].norm(dim=-1)
    share: float = sum(targets[row] for row in sampled) / sum(targets)
    return (perf_counter() - start) / share


def positions(model: Any, inputs: Mapping[str, Any], labels: Tensor) -> float:
    """Time one backward pass of the batch per position, starting from the log-probabilities."""
    start = perf_counter()
    embedded, log_p = log_probabilities(model, inputs, labels)
    for step in log_p.sum(0):
        grad(step, embedded, retain_graph=True)[0].norm(dim=-1)
    return perf_counter() - start


def source_gradients_seconds(model: Any, inputs: Mapping[str, Any], labels: Tensor) -> float:
    """Time the library's implementation."""
    start = perf_counter()
    source_gradients(model, inputs, labels)
    return perf_counter() - start


def log_probabilities(model: Any, inputs: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return source embeddings (B, S, D) and the log-probabilities (B, T) that depend on them; 0 without a label."""
    seen: list[Tensor] = []
    handle = model.get_encoder().get_input_embeddings().register_forward_hook(lambda *call: seen.append(call[-1]))
    logits = model(**{**inputs, "use_cache": False}).logits
    handle.remove()
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return seen[0], chosen * (labels != -100)


def marian() -> Any:
    """Build a random model with the shape of the shipped ones: 3 + 3 layers, width 256, 8,000 pieces."""
    sizes: dict[str, Any] = {"vocab_size": 8000, "d_model": 256, "pad_token_id": 1, "decoder_start_token_id": 1}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 3, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 1024}
    return MarianMTModel(MarianConfig(**sizes)).train(False)


def random_batch(sentences: int, pieces: int) -> Batch:
    """Build sentences whose lengths vary by a fifth around a mean."""
    shape = sentences, pieces * 6 // 5
    sources, targets = (torch.randint(pieces * 4 // 5, shape[1] + 1, (sentences, 1)) for _ in range(2))
    ids, labels = (torch.randint(3, 8000, shape) for _ in range(2))
    mask = torch.arange(shape[1]) < sources
    labels[torch.arange(shape[1]) >= targets] = -100
    read = labels.roll(1, dims=1).clamp(min=1)
    return {"input_ids": ids * mask + ~mask, "attention_mask": mask.long(), "decoder_input_ids": read}, labels


def report(repeats: int) -> None:
    """Print the table."""
    torch.manual_seed(0)
    model = marian()
    for sentences, pieces in ((16, 25), (64, 25), (16, 60)):
        times = compare(model, [random_batch(sentences, pieces)], repeats)
        print(f"saliency, {sentences} sentences of {pieces} pieces, time ÷ that of source_gradients:", flush=True)
        for way, seconds in times.items():
            print(f"  {seconds / times['source_gradients']:6.2f}  {way}", flush=True)
