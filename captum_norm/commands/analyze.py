"""Runs ``captum-norm analyze``, which repeats the papers' experiments on a model and a corpus."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from captum_norm.bars import progress
from captum_norm.commands.program import Command, Options, argument, option
from captum_norm.commands.shared import device_option, natural, output_folder, positive
from captum_norm.errors import InvalidInputError
from captum_norm.loading import DEFAULT_MODEL

NAMES = ("dispersion", "special-tokens", "frequency", "mixing-ratio", "expansion-rate", "contextualization-change")
"""The names of :data:`captum_norm.lab.analysis.engine.ANALYSES`, without importing torch."""


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(Options):
    """The options of ``captum-norm analyze``."""

    analysis: str = argument(f"the experiment: {', '.join(NAMES)}", metavar="NAME", choices=NAMES)
    model: str = option(
        "a model folder or a name on the Hugging Face hub; for an encoder–decoder model, its encoder is measured",
        DEFAULT_MODEL,
        metavar="NAME_OR_PATH",
    )
    corpus: str | None = option(
        "the path or URL of the text, UTF-8; .gz, .xz and .bz2 are decompressed (default: 200 "
        "sentences of Europarl in this package)",
        metavar="FILE",
    )
    limit: int | None = option("read only the first N texts", parse=positive, metavar="N")
    out: Path | str | None = option(
        "the folder or URL to write the results to: numbers, tables, figures and a page",
        parse=partial(output_folder, urls=True),
        metavar="FOLDER",
    )
    seed: int = option("the seed for masking tokens", 0, parse=natural, metavar="N")
    mask_rate: float | None = option(
        "the share of ordinary tokens to mask (default: 0.12 for mixing-ratio, else 0)", metavar="SHARE"
    )
    batch_tokens: int = option(
        "the maximum number of tokens in a batch, including padding", 4096, parse=positive, metavar="N"
    )
    device: str = device_option()


def _run(options: AnalyzeOptions) -> None:
    from captum_norm.commands.terminal import Terminal
    from captum_norm.lab.analysis.corpus import SAMPLE, Corpus
    from captum_norm.lab.analysis.engine import analyze
    from captum_norm.loading import load, on_device
    from captum_norm.show import write_report
    from captum_norm.show.terminal import print_result

    console = Terminal()
    corpus = Corpus(options.corpus or SAMPLE, options.limit)
    with progress(terminal_only=True):
        model, tokenizer = load(options.model)
        result = analyze(
            options.analysis,
            on_device(model, options.device),
            tokenizer,
            corpus,
            seed=options.seed,
            mask_rate=options.mask_rate,
            batch_tokens=options.batch_tokens,
            model_name=options.model,
            command=" ".join(["captum-norm", *sys.argv[1:]]),
        )
    print_result(result, console)
    if options.out is not None:
        try:
            written = write_report(result, options.out)
        except OSError as error:
            raise InvalidInputError(f"cannot write into {options.out}: {error.strerror or error}") from error
        console.say(f"wrote {len(written)} files into {options.out}")


COMMAND = Command(
    "analyze",
    "repeat the papers' experiments on a model and a corpus",
    AnalyzeOptions,
    _run,
    example="captum-norm analyze mixing-ratio --out report",
    common=("model", "corpus", "limit", "device", "out"),
)
