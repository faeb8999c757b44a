"""How DecompX's norms depend on where biases are shared: ``python -m benchmarks.decompx``.

The paper shares attention's bias among the vectors of attention's output, before the residual connection joins them
[Modarressi et al. 2023, eq. 3 to 6]. The authors' code shares it after the sum, and in the first layer leaves the value
bias inside the vectors of the tokens attended to. The benchmark compares the norms of each token's part of the last
layer's output, in float64, for the demo's sentences and model.
"""

from typing import get_args

import torch
from rich.console import Console
from rich.table import Table

from captum_norm import DecompX
from captum_norm.attr.frozen.decompx import Bias
from captum_norm.demo import CAPTIONS
from captum_norm.functional import spearman
from captum_norm.loading import load
from tests.attr.frozen.decompx_by_hand import bert_states, eager


@torch.no_grad()
def differences() -> Table:
    """Return a table with one row per way to share biases."""
    model, tokenizer = load()
    model = model.double()
    table = Table(title="norms by the authors' order, relative to those by the paper's equations")
    for column in ("bias", "mean difference", "largest difference", "Spearman's ρ of a row, mean"):
        table.add_column(column, justify="left" if column == "bias" else "right")
    for bias in get_args(Bias)[1:]:
        method, found, correlations = DecompX(model, bias), [], []
        for caption in CAPTIONS:
            ids = tokenizer(caption, return_tensors="pt")["input_ids"]
            norms = method.maps(ids, layers=[-1]).self_attention[0, 0]
            released = bert_states(model.encoder, eager(model, ids), bias, released=True)[-1][:, :-1].norm(dim=-1)
            found.append(((released - norms).abs() / norms).flatten())
            correlations += [spearman(*pair) for pair in zip(released, norms, strict=True)]
        each = torch.cat(found)
        table.add_row(bias, f"{each.mean():.1%}", f"{each.max():.0%}", f"{torch.stack(correlations).mean():.3f}")
    return table


if __name__ == "__main__":
    Console(width=110).print(differences())
