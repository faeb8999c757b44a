"""The cost of explaining an answer relative to a forward pass over its text: ``python -m benchmarks.generation``.

A GPT-2 of the small one's shape, with random weights, on two CPU threads; a prompt of 512 tokens, an answer of 64.
Ratios compare the whole call, tokenizer aside, with the plain forward pass over prompt and answer, timed alternately in
one run. The mean of the layers needs the rows of the answer alone, a rollout those of all positions. Integrated
gradients of Captum and, where it is installed, of inseq explain one token at a time; they are timed for a few tokens.
``--long`` measures the memory of long texts instead (:mod:`benchmarks.long_answers`).
"""

import argparse
from functools import partial
from importlib import import_module
from time import perf_counter
from typing import Any

import torch
from captum.attr import Attribution, InputXGradient, LayerIntegratedGradients, LLMGradientAttribution, TextTokenInput
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from benchmarks.long_answers import LENGTHS, report
from benchmarks.norms import Run, alternate
from captum_norm import (
    ALTI,
    GIM,
    AttnLRP,
    DecompX,
    GenerationAttribution,
    NormAttribution,
    TokenAttribution,
)

STEPS = 20
STEPS_AT_ONCE = 4
"""Logits of more steps at a time take gigabytes."""


def numbers(count: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose words are numbers: benchmarks need no text."""
    made = Tokenizer(models.WordLevel({str(number): number for number in range(count)}, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made)  # type: ignore[no-untyped-call]


def generation(method: Attribution) -> GenerationAttribution:
    """Explain answers of numbers."""
    return GenerationAttribution(method, numbers(GPT2Config().vocab_size))


def whole_answers(model: GPT2LMHeadModel, prompt: Tensor, answer: Tensor) -> dict[str, tuple[Run, float | None]]:
    """Return the runs that explain a whole answer, each with the ratio to reach."""

    def explained(method: Attribution, **options: Any) -> Run:
        return partial(generation(method).attribute, prompt, answer, **options)

    return {
        "norms, mean of the layers": (explained(NormAttribution(model, aggregation="mean")), 1.5),
        "norms, rollout": (explained(NormAttribution(model)), None),
        "ALTI, mean of the layers": (explained(ALTI(model, "mean")), 2.2),
        "ALTI, rollout": (explained(ALTI(model)), None),
        "DecompX, the whole": (explained(DecompX(model), per_token=False), 4),
        "AttnLRP, the whole": (explained(AttnLRP(model), per_token=False), 4),
        "GIM, the whole": (explained(GIM(model), per_token=False), 4),
    }


def costs(model: GPT2LMHeadModel, prompt: Tensor, answer: Tensor, repeats: int) -> Table:
    """Return the table of what explaining a whole answer costs."""
    text = torch.cat([prompt, answer])[None, :-1]

    def forward() -> object:
        with torch.no_grad():
            return model(text)

    runs = whole_answers(model, prompt, answer)
    plain, *times = alternate([forward, *(run for run, _ in runs.values())], repeats)
    table = Table(title=f"GPT-2 small shape, {len(prompt)} + {len(answer)} tokens: whole call ÷ forward pass")
    for column in ("", "time", "ratio", "to reach"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("plain forward pass", f"{plain * 1e3:.0f} ms", "1.00", "–")
    for (name, (_, reach)), taken in zip(runs.items(), times, strict=True):
        table.add_row(name, f"{taken * 1e3:.0f} ms", f"{taken / plain:.2f}", "–" if reach is None else f"≤ {reach}")
    return table


def rows(model: GPT2LMHeadModel, prompt: Tensor, answer: Tensor, single: int) -> Table:
    """Return the table of what one row per token costs: in one pass, a pass per row, and with Captum."""
    tokens = len(answer)
    whole = torch.cat([prompt, answer])[None]
    places = torch.linspace(0, tokens - 1, single).long().tolist()

    def of_one_token(method: Any) -> float:
        """Mean seconds of a call that explains one token by a pass over what comes before it."""
        begun = perf_counter()
        for place in places:
            method.attribute(whole[:, : len(prompt) + place], target=int(answer[place]))
        return (perf_counter() - begun) / single

    table = Table(title=f"one row for each of {tokens} tokens: seconds; passes a row from {single} of the tokens")
    for column in ("", "together", "a pass a row", "ratio", "to reach"):
        table.add_column(column, justify="right" if column else "left")
    for name, method in {"DecompX": DecompX(model), "AttnLRP": AttnLRP(model), "GIM": GIM(model)}.items():
        method.attribute(whole, target=0)
        begun = perf_counter()
        generation(method).attribute(prompt, answer)
        together = perf_counter() - begun
        apart = of_one_token(method) * tokens
        table.add_row(name, f"{together:.1f}", f"{apart:.1f}", f"{together / apart:.2f}", "≤ 0.5")
    gradients = of_one_token(TokenAttribution(model, InputXGradient)) * tokens
    table.add_row("input × gradient (Captum's, by TokenAttribution)", "–", f"{gradients:.1f}", "–", "–")
    return table


def beside_others(model: GPT2LMHeadModel, prompt: Tensor, answer: Tensor, single: int) -> Table:
    """Return the table of the seconds that a matrix of answer by prompt takes, with integrated gradients and norms."""
    words: Any = numbers(model.config.vocab_size)
    norms = generation(NormAttribution(model, aggregation="mean"))
    norms.attribute(prompt, answer)
    ours = _seconds(partial(norms.attribute, prompt, answer))
    table = Table(title=f"a matrix of {len(answer)} × {len(prompt)}: seconds; gradients' from {single} of the tokens")
    for column in ("", "seconds", "÷ norms", "to reach"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("norms", f"{ours:.2f}", "1", "–")
    for name, run in {"Captum": with_captum, "inseq": with_inseq}.items():
        title = f"{name}, integrated gradients of {STEPS} steps"
        try:
            theirs = run(model, words, prompt, answer[:single]) / single * len(answer)
        except ImportError as error:
            table.add_row(title, f"not measured: {error}", "–", "≥ 100")
        else:
            table.add_row(title, f"{theirs:.0f}", f"{theirs / ours:.0f}", "≥ 100")
    return table


def with_captum(model: GPT2LMHeadModel, words: Any, prompt: Tensor, answer: Tensor) -> float:
    """Return the seconds that Captum takes for an answer."""
    captum = LLMGradientAttribution(LayerIntegratedGradients(model, model.transformer.wte), words)
    inputs = TextTokenInput(words.decode(prompt), words)
    return _seconds(partial(captum.attribute, inputs, target=answer, n_steps=STEPS, internal_batch_size=STEPS_AT_ONCE))


def with_inseq(model: GPT2LMHeadModel, words: Any, prompt: Tensor, answer: Tensor) -> float:
    """Return the seconds that inseq takes for an answer.

    Raises:
        ImportError: inseq, or a package that it needs, is not installed.
    """
    explained = import_module("inseq").load_model(model, "integrated_gradients", tokenizer=words)
    before, whole = words.decode(prompt), words.decode(torch.cat([prompt, answer]))
    options = {"n_steps": STEPS, "internal_batch_size": STEPS_AT_ONCE, "show_progress": False}
    return _seconds(partial(explained.attribute, before, whole, **options))


def _seconds(run: Run) -> float:
    begun = perf_counter()
    run()
    return perf_counter() - begun


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--answer", type=int, default=64, help="tokens of the answer (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timings of everything (default: %(default)s)")
    parser.add_argument("--single", type=int, default=4, help="tokens explained one by one (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--long", type=int, nargs="*", help="memory of long texts; tokens (default: 8192 and 32768)")
    arguments = parser.parse_args()
    if arguments.long is not None:
        report(arguments.long or LENGTHS, arguments.threads)
        return
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config())
    model.train(False)
    ids = torch.randint(0, model.config.vocab_size, (arguments.prompt + arguments.answer,))
    prompt, answer = ids[: arguments.prompt], ids[arguments.prompt :]
    console = Console()
    console.print(costs(model, prompt, answer, arguments.repeats))
    console.print(rows(model, prompt, answer, arguments.single))
    console.print(beside_others(model, prompt, answer, min(arguments.single, arguments.answer)))


if __name__ == "__main__":
    main()
