"""Shows on a real model that tokens with most attention weight may contribute little.

For a group of keys G, [CLS] or the ordinary tokens (all but [CLS] and [SEP]), in each layer of a sentence encoder,

    weight(G) = mean over queries i and heads h of  Σ_{j∈G} α_hij
    norm(G)   = mean over queries i and heads h of  Σ_{j∈G} ‖α_hij f_h(x_j)‖

averaged over captions. Both are per head: ‖α f‖ is measured before the heads are summed [Kobayashi et al. 2020].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from captum_norm.attr.norms import NormAttribution
from captum_norm.attr.weights import AttentionWeights
from captum_norm.loading import DEFAULT_MODEL, load
from captum_norm.show.figures import Panel, draw_heatmaps
from captum_norm.show.terminal import show_tokens

CAPTIONS = (
    "A man is playing a guitar on stage.",
    "Two dogs run along the beach in the sun.",
    "A woman slices tomatoes in a small kitchen.",
    "Children are building a castle out of wet sand.",
    "A cyclist rides down a steep mountain path.",
    "An old man reads a newspaper on a park bench.",
    "A red bus stops in front of a crowded market.",
    "Three people in yellow jackets repair a wooden boat.",
)

_WEIGHT = "weight α"
_NORM = "norm ‖αf(x)‖"


@dataclass(frozen=True)
class Findings:
    """The comparison of all layers, with the tokens and maps (S, S) of the first sentence, where [CLS] is heaviest."""

    layers: Tensor  # weight(G) and norm(G) of [CLS], then those of the ordinary tokens, by layer, (L, 4)
    layer: int
    tokens: Sequence[str]
    weights: Tensor
    norms: Tensor


def compare_layers() -> Findings:
    """Compare weights and norms of [CLS] and of ordinary tokens in each layer; the maps are of the first sentence."""
    model, tokenizer = load()
    encoded = [tokenizer(sentence, return_tensors="pt") for sentence in CAPTIONS]
    # (L, S, S) for each sentence: the mean over heads of what is measured per head.
    weights, norms = (
        [method.maps(inputs, per_head=True).self_attention[0].mean(1) for inputs in encoded]
        for method in (AttentionWeights(model, scope="attn"), NormAttribution(model, scope="attn"))
    )
    # What a group of keys gives, mean over queries and sentences.
    layers = torch.stack(
        [
            torch.stack([maps[:, :, keys].sum(-1).mean(-1) for maps in measured]).mean(0)
            for keys in (slice(0, 1), slice(1, -1))
            for measured in (weights, norms)
        ],
        dim=1,
    )
    layer = int(layers[:, 0].argmax())
    tokens = tokenizer.convert_ids_to_tokens(encoded[0]["input_ids"][0].tolist())
    return Findings(layers, layer, tokens, weights[0][layer], norms[0][layer])


def show(findings: Findings, console: Console) -> None:
    """Print the comparison, and the first sentence shaded by weight and by norm."""
    cls_weight, cls_norm, _, ordinary_norm = findings.layers[findings.layer].tolist()
    introduction = (
        f"{DEFAULT_MODEL}, {len(CAPTIONS)} captions. For each layer: how much attention weight a query gives to [CLS] "
        "and to all ordinary tokens together, and how long the vectors are that it receives from them.\n"
    )
    conclusion = (
        f"\n{_WEIGHT}, {_NORM}: per head, summed over the keys of the group (ordinary: all but [CLS] and [SEP]); mean "
        f"over heads, queries and sentences.\nIn layer {findings.layer} [CLS] gets {cls_weight:.0%} of the weight but "
        f"gives {cls_norm / (cls_norm + ordinary_norm):.0%} of the norm that comes from it and the ordinary tokens.\n"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layer", f"[CLS]\n{_WEIGHT}", f"[CLS]\n{_NORM}", f"ordinary\n{_WEIGHT}", f"ordinary\n{_NORM}"):
        table.add_column(Text(name), justify="right")  # no markup
    for index, values in enumerate(findings.layers.tolist()):
        style = "bold" if index == findings.layer else None
        table.add_row(str(index), *(f"{value:.2f}" for value in values), style=style)
    console.print(Text(introduction), table, Text(conclusion), sep="\n")
    for name, maps in ((_WEIGHT, findings.weights), (_NORM, findings.norms)):
        console.print(Text(f"Layer {findings.layer} by {name}, mean over heads and queries:"))
        show_tokens(console, findings.tokens, maps.mean(0).tolist(), unit=name)
        console.print()


def draw(findings: Findings) -> Figure:
    """Draw both maps of the first sentence side by side."""
    panels = [
        Panel("attention weights, mean over heads", findings.weights, _WEIGHT),
        Panel("norms of the weighted vectors, mean over heads", findings.norms, _NORM),
    ]
    return draw_heatmaps(panels, findings.tokens, title=f"{DEFAULT_MODEL}, layer {findings.layer}")
