"""The cost of corpus analyses relative to the plain forward pass: ``python -m benchmarks.analysis``.

The same batches go alternately through the model alone and each analysis (forward pass included), in one thread.
Processor time is measured, on which other load has little effect. Throughput is the plain forward pass's time over the
analysis's; the target is 0.7 for special-tokens and mixing-ratio.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from time import process_time

import torch
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertModel

from benchmarks.norms import Run, alternate
from captum_norm.lab.analysis.corpus import SAMPLE, Corpus, Encoder, TokenBatch, longest
from captum_norm.lab.analysis.engine import ANALYSES
from captum_norm.lab.analysis.statistics import Analysis, AnalysisContext
from captum_norm.loading import load


def work(analysis: Analysis, batches: Sequence[TokenBatch]) -> None:
    """Run the analysis on some batches."""
    for batch in batches:
        analysis.update(batch, analysis.measure(batch))


def forward(model: torch.nn.Module, batches: Sequence[TokenBatch]) -> None:
    """Run the model alone."""
    with torch.no_grad():
        for batch in batches:
            model(**batch.inputs(torch.device("cpu")))


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=SAMPLE, help="the text (default: that of the package)")
    parser.add_argument("--texts", type=int, default=64, help="how many lines")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--base", action="store_true", help="a model of BERT-base's shape, too")
    parser.add_argument("names", nargs="*", default=["special-tokens", "mixing-ratio"], help="the analyses")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    small, tokenizer = load()
    models: dict[str, torch.nn.Module] = {"all-MiniLM-L6": small}
    if options.base:
        models["BERT-base shape"] = BertModel(BertConfig(), add_pooling_layer=False).train(False)
    table = Table(title="throughput ÷ that of the plain forward pass in the same batches")
    for column in ("model", "tokens", "forward", *options.names):
        table.add_column(column, justify="right")
    for title, model in models.items():
        corpus = Corpus(options.corpus, limit=options.texts)
        runs: list[Run] = []
        for name in options.names:
            kind = ANALYSES[name]
            encoder = Encoder(tokenizer, longest(model, tokenizer), mask_rate=kind.mask_rate)
            context = AnalysisContext(kind, model, encoder, corpus)
            texts = list(islice(corpus.texts(), options.texts))
            batches = list(encoder.batches(encoder.sequences(texts), options.batch_tokens))
            runs += [partial(forward, model, batches), partial(work, kind(context), batches)]
        taken = alternate(runs, options.repeats, process_time)
        tokens = sum(int(batch.real.sum()) for batch in batches)
        ratios = [f"{plain / own:.2f}" for plain, own in zip(taken[::2], taken[1::2], strict=True)]
        table.add_row(title, f"{tokens:,}", f"{taken[0]:.2f} s", *ratios)
    Console().print(table)


if __name__ == "__main__":
    main()
