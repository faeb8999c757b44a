r"""Adds the similarity of embeddings to norms: ``python -m benchmarks.added_similarity --corpus wpt03=DIR``.

Both shipped models align each text by norms, and by norms and the similarity of their input embeddings added, without a
lexicon and with that of the text. It prints AER in %, p of the difference (approximate randomisation) and the weights
that were chosen without gold links, of each model.
"""

import argparse

import torch

from alignment import (
    BidirectionalAligner,
    EncoderAligner,
    WordAligner,
    alignment_error_rate,
    load_shipped_model,
    paired_significance,
)
from alignment.commands.sweep import corpora as corpora_of
from benchmarks.alignment_error import table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--corpus", action="append", default=[], help="wpt03=DIR; the stories are always included")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = [load_shipped_model(name) for name in ("fr-en", "en-fr")]
    rows = []
    for corpus in [corpus for text in [*arguments.corpus, "alibi"] for corpus in corpora_of(text)]:
        alone = [WordAligner(*model) for model in models]
        added = [WordAligner(*model, similarity=EncoderAligner(*model, source="embeddings")) for model in models]
        cells = list[str]()
        for lexicon in (False, True):
            norms, both = (
                BidirectionalAligner(forward, reverse, count_text=lexicon).align(corpus.sources, corpus.targets)
                for forward, reverse in (alone, added)
            )
            rates = [alignment_error_rate(links, corpus.gold).aer for links in (norms, both)]
            [p_value] = paired_significance(norms, [both], corpus.gold).p_values
            cells += [*(f"{rate:.2f}" for rate in rates), f"{p_value:.4f}"]
        rows.append([corpus.name, *cells, " ".join(str(aligner.choose([]).weight) for aligner in added)])
        print(*rows[-1], flush=True)
    columns = ["norms", "added", "p"]
    print(table(["system", *columns, *columns, "weights"], rows))


if __name__ == "__main__":
    main()
