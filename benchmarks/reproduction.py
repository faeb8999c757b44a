r"""The documentation page on the papers' experiments: ``python -m benchmarks.reproduction``.

```console
$ python -m benchmarks.reproduction --corpus train.en.xz --out docs/reproduction.md
```

Every analysis runs on the encoder of the extra ``demo`` and on the encoder of the English–French translation model that
comes with the package, over the first lines of an English text. An interrupted run resumes.
"""

import argparse
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from alignment.fairseq.loading import load_shipped_model
from alignment.fairseq.tokenizer import EOS, SPECIAL, read_dictionary
from alignment.normalization import tokenize
from benchmarks.checkpoints import MODELS
from benchmarks.published import EXPERIMENTS, Claim, Experiment, Number, Series
from captum_norm.lab.analysis import read_result
from captum_norm.lab.analysis.corpus import Corpus
from captum_norm.lab.analysis.engine import analyze
from captum_norm.lab.analysis.results import AnalysisResult
from captum_norm.loading import load
from captum_norm.show import draw_plot, plot_bytes, write_report
from captum_norm.text.files import write_whole

INTRODUCTION = """\
# Reproducing the papers

Written by `python -m benchmarks.reproduction`. This page lists, for each number that the papers report, the published
value, the command that measures it on the papers' model, and the result of the same analysis on two models that come
with this package. Since these are other models, their numbers may differ. The tables of findings show whether the
papers' findings hold for them; *holds* says which of two numbers of the run is smaller, not that they are far apart.
See also [Analyses](analyses.md).

The commands fetch `bert-base-uncased` from the Hugging Face hub. `wikipedia.txt` stands for a text with one sequence on
each line; the 2020 paper uses 992 from Wikipedia, of two segments each. Layers count from 0: layer 0 is the papers'
layer 1.
"""
TRANSLATION = """\
## Word alignment

Kobayashi et al. 2020, section 5: AER in % of a German–English model, mean over five seeds.

| read from | AWO weights | AWO norms | AWI weights | AWI norms |
| --- | --: | --: | --: | --: |
| mean over layers | 68.43 | 62.86 | 68.54 | 60.45 |
| best layer | 47.74 | 41.36 | 29.77 | 24.98 |
| layer with the highest mean norm | – | 83.03 | – | 24.98 |
| head with the highest mean norm | – | 87.09 | – | 35.53 |
| Spearman correlation of AER with the heads' mean norm | – | .556 | – | −.436 |
| Pearson correlation | – | .554 | – | −.517 |

```console
$ norm-align sweep --model seed1.pt --data data-bin --corpus rwth=rwth-de-en --out seed1
```

repeats the experiment on a fairseq model and the gold alignments of RWTH, with the correlations; the files `sweep.csv`
of several seeds give mean and standard deviation. Without arguments it uses the model and the stories of the package.
[Alignment error rates](alignment-error.md) has the error rates of the shipped models.

## Faithfulness

The DecompX paper reports AOPC (higher is better) of BERT-base:

| data | GlobEnc | ALTI | gradient × input | integrated gradients | DecompX |
| --- | --: | --: | --: | --: | --: |
| SST-2 | .307 | .416 | .310 | .340 | .627 |
| MNLI | .498 | .515 | .544 | .579 | .703 |

```console
$ captum-norm compare dev.tsv --model textattack/bert-base-uncased-SST-2 --out sst2.html --out sst2.json
```

measures it for every method; each line of `dev.tsv` is a sentence, a tab and its label.
[Which method is faithful](which-method.md) has the results for a smaller model, [Faithfulness](faithfulness.md) the
choices that change them.
"""
FIGURES: Mapping[str, Sequence[str]] = {
    "special-tokens": ("weight-by-layer", "product-by-layer"),
    "mixing-ratio": ("variants-by-layer",),
    "contextualization-change": ("change",),
}


@dataclass(frozen=True)
class Subject:
    """A model to analyse.

    Attributes:
        name: the name of its folder.
        title: its name on the page.
        model: the model; in an encoder–decoder model the encoder is analysed.
        tokenizer: its tokenizer.
        corpus: the text as its tokenizer reads it.
    """

    name: str
    title: str
    model: Any
    tokenizer: Any
    corpus: Corpus


@dataclass(frozen=True)
class Run:
    """The results of the analyses on one model, by name, and the processor time of each in seconds."""

    subject: Subject
    results: dict[str, AnalysisResult]
    seconds: dict[str, float]


def sentence_encoder(corpus: Corpus) -> Subject:
    """Load the encoder of the extra ``demo``."""
    model, tokenizer = load()
    return Subject("all-minilm-l6", "all-MiniLM-L6", model, tokenizer, corpus)


def translation_encoder(corpus: Corpus, folder: Path) -> Subject:
    """Load the encoder of the English–French model; its corpus is a file with the pieces as words."""
    model, tokenizer = load_shipped_model("en-fr")
    dictionary = read_dictionary(MODELS / "dictionary.txt", model.config.vocab_size)
    path = folder / f"{corpus}, in pieces"
    if not path.exists():
        encoded = (tokenizer.encode_source([tokenize(text, "en")])[0].ids[:-1] for _, text in corpus.texts())
        lines = (" ".join(dictionary.symbols[index] for index in ids) for ids in encoded)
        write_whole(path, "".join(f"{line}\n" for line in lines).encode())
    pieces = Tokenizer(WordLevel(dict(dictionary.indices), unk_token="<unk>"))
    pieces.pre_tokenizer = WhitespaceSplit()
    end = SPECIAL[EOS]
    pieces.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, EOS)])
    special = {"eos_token": end, "pad_token": "<pad>", "unk_token": "<unk>"}
    plain = PreTrainedTokenizerFast(tokenizer_object=pieces, **special)  # type: ignore[no-untyped-call]
    return Subject("en-fr", "en-fr, encoder", model, plain, Corpus(path))


def run(subject: Subject, folder: Path) -> Run:
    """Run every analysis on one model, or read the results of an earlier run."""
    results, seconds = {}, {}
    for experiment in EXPERIMENTS:
        name = experiment.analysis
        out = folder / subject.name / name
        took = out / "seconds.json"
        if not took.exists():
            out.mkdir(parents=True, exist_ok=True)
            start = time.process_time()
            corpus = subject.corpus
            if experiment.lines is not None:
                corpus = replace(corpus, limit=min(experiment.lines, corpus.limit or experiment.lines))
            result = analyze(name, subject.model, subject.tokenizer, corpus, model_name=subject.title)
            write_report(result, out)
            write_whole(took, json.dumps(time.process_time() - start).encode())
        results[name], seconds[name] = read_result(out), json.loads(took.read_text())
        print(f"{subject.title}: {name}, {seconds[name]:.0f} s", flush=True)
    return Run(subject, results, seconds)


def page(runs: Sequence[Run], images: Path) -> Iterator[str]:
    """Yield the page part by part, and write its figures to the folder ``images``."""
    yield INTRODUCTION
    yield "## What was run\n"
    yield _corpora(runs)
    yield _times(runs)
    for experiment in EXPERIMENTS:
        yield f"## {experiment.title}\n\n{experiment.source}.\n"
        name = experiment.analysis
        yield (
            "```console\n"
            f"$ captum-norm analyze {name} --model bert-base-uncased --corpus wikipedia.txt --out bert-{name}\n"
            "```\n"
        )
        if experiment.lines is not None:
            yield f"Here on the first {experiment.lines:,} lines.\n"
        found = [run.results[name] for run in runs]
        titles = [run.subject.title for run in runs]
        if experiment.numbers:
            header = ["measure", "BERT-base, paper", *titles]
            yield table(header, [[number.text, number.paper, *_values(number, found)] for number in experiment.numbers])
        for series in experiment.series:
            yield _by_layer(series, found, titles)
        if experiment.claims:
            yield "Findings:\n"
            rows = [[claim.text, *_verdicts(claim, found)] for claim in experiment.claims]
            yield table(["finding", *titles], rows, left=1 + len(titles))
        if experiment.note:
            yield experiment.note
        yield from _tables(experiment, runs)
        for plot in (plot for plot in found[0].plots if plot.name in FIGURES.get(name, ())):
            image = images / f"reproduction-{name}-{plot.name}.png"
            write_whole(image, plot_bytes(draw_plot(found[0], plot), "png"))
            yield f"```{{figure}} _static/{image.name}\n:width: 26em\n\n{plot.title}, {titles[0]}.\n```\n"
    yield TRANSLATION


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return a Markdown table; all but the first ``left`` columns are right-aligned."""
    rule = ["---" if place < left else "--:" for place in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)) + "\n"


def _corpora(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        corpus = next(iter(run.results.values())).metadata["corpus"]
        layers = len(set(run.results["special-tokens"].table("layers").column("layer")))
        counts = [f"{corpus[name]:,}" for name in ("texts", "tokens")]
        rows.append([run.subject.title, corpus["name"], str(layers), *counts, f"`{corpus['sha256'][:16]}…`"])
    return table(["model", "text", "layers", "lines", "tokens", "SHA-256"], rows, left=2)


def _times(runs: Sequence[Run]) -> str:
    names = [experiment.analysis for experiment in EXPERIMENTS]
    versions = ", ".join(f"{name} {found}" for name, found in runs[0].results[names[0]].metadata["versions"].items())
    machine = f"{platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} cores"
    rows = [[run.subject.title, *(f"{run.seconds[name]:,.0f}" for name in names)] for run in runs]
    return (
        f"Processor time in seconds, from the loaded model to the written report ({machine}; {versions}):\n\n"
        + table(["model", *names], rows)
    )


def _values(number: Number, results: Sequence[AnalysisResult]) -> list[str]:
    return [_shown(number.find(result), number.form) for result in results]


def _by_layer(series: Series, results: Sequence[AnalysisResult], titles: Sequence[str]) -> str:
    published = series.paper.split()
    layers = range(len(published))
    rows = [["BERT-base, paper", *published]]
    for title, result in zip(titles, results, strict=True):
        values = [series.find(layer)(result) for layer in layers]
        if any(value is not None for value in values):
            rows.append([title, *("" if value is None else f"{100 * value:.0f}" for value in values)])
    return table([f"{series.text}, by layer", *map(str, layers)], rows)


def _verdicts(claim: Claim, results: Sequence[AnalysisResult]) -> list[str]:
    cells = []
    for result in results:
        left, right = claim.left(result), claim.right(result)
        if left is None or right is None:
            cells.append("–")
            continue
        sign = "<" if left < right else "≥"
        verdict = "holds" if left < right else "does not hold"
        cells.append(f"{verdict}: {_shown(left, claim.form)} {sign} {_shown(right, claim.form)}")
    return cells


def _tables(experiment: Experiment, runs: Sequence[Run]) -> Iterator[str]:
    """Yield results without published counterparts."""
    for name in experiment.tables:
        for run in runs:
            found = run.results[experiment.analysis].table(name)
            yield f"{found.title}, {run.subject.title}:\n"
            rows = [[_shown(value, ".2f") for value in row] for row in found.rows]
            yield table([column.label for column in found.columns], rows)


def _shown(value: float | str | None, form: str) -> str:
    if value is None:
        return "–"
    if isinstance(value, str | int):
        return str(value)
    return f"{value:{form}}".replace("-", "−").replace("%", " %")


def main() -> None:
    """Run everything and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--corpus", type=Path, required=True, help="an English text, one sentence per line")
    parser.add_argument("--sentences", type=int, default=10_000, help="number of lines to read")
    parser.add_argument("--work", type=Path, default=Path("build/reproduction"), help="folder of the results")
    parser.add_argument("--restart", action="store_true", help="discard earlier results")
    parser.add_argument("--out", type=Path, default=Path("docs/reproduction.md"))
    arguments = parser.parse_args()
    if arguments.restart:
        shutil.rmtree(arguments.work, ignore_errors=True)
    corpus = Corpus(arguments.corpus, limit=arguments.sentences)
    folder = arguments.work / f"{corpus}-{arguments.sentences}"
    folder.mkdir(parents=True, exist_ok=True)
    subjects = [sentence_encoder(corpus), translation_encoder(corpus, folder)]
    runs = [run(subject, folder) for subject in subjects]
    images = arguments.out.parent / "_static"
    images.mkdir(exist_ok=True)
    write_whole(arguments.out, "\n".join(page(runs, images)).encode())


if __name__ == "__main__":
    main()
