"""Shows on a real model that tokens with most attention weight may contribute little.

The model is the pretrained all-MiniLM-L6 sentence encoder, the texts are eight captions. In the middle layers its
[CLS] receives most of the attention weight, but its transformed vector f(x) is so short that it contributes almost
nothing.

For a group of keys G (here: [CLS], or the ordinary tokens, which are all but [CLS] and [SEP]) and one layer,

    weight(G) = mean over queries i and heads h of  Σ_{j∈G} α_hij
    norm(G)   = mean over queries i and heads h of  Σ_{j∈G} ‖α_hij f_h(x_j)‖

with all tokens as queries, averaged over sentences. Both are per head: ‖α f‖ is measured before summing the heads
[Kobayashi et al. 2020, section 3]. [SEP] has the rest of the weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from captum_norm.attr import AttentionWeights, NormAttribution
from captum_norm.loading import DEFAULT_MODEL, load
from captum_norm.show.figures import Panel, draw_heatmaps
from captum_norm.show.terminal import show_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
class LayerComparison:
    """Weights and norms of [CLS] and of all ordinary tokens in one layer, as defined in the docstring of the module."""

    cls_weight: float
    cls_norm: float
    ordinary_weight: float
    ordinary_norm: float


@dataclass(frozen=True)
class Findings:
    """A comparison for each layer; tokens and maps (S, S) of the first sentence, where [CLS] is heaviest."""

    layers: Sequence[LayerComparison]
    layer: int
    tokens: Sequence[str]
    weights: Tensor
    norms: Tensor
    sentences: int


def compare_layers(sentences: Sequence[str] = CAPTIONS, model_name: str = DEFAULT_MODEL) -> Findings:
    """Compare weights and norms of [CLS] and of ordinary tokens in each layer; the maps are of the first sentence."""
    model, tokenizer = load(model_name)
    weights_of, norms_of = AttentionWeights(model, scope="attn"), NormAttribution(model, scope="attn")
    encoded = [tokenizer(sentence, return_tensors="pt") for sentence in sentences]
    # (L, S, S) for each sentence: the mean over heads of what is measured per head.
    weights = [weights_of.maps(inputs, per_head=True).self_attention[0].mean(1) for inputs in encoded]
    norms = [norms_of.maps(inputs, per_head=True).self_attention[0].mean(1) for inputs in encoded]
    columns = [
        _mean([_received(maps, keys) for maps in measured])
        for keys in (slice(0, 1), slice(1, -1))
        for measured in (weights, norms)
    ]
    layers = [LayerComparison(*values) for values in zip(*columns, strict=True)]
    layer = max(range(len(layers)), key=lambda index: layers[index].cls_weight)
    tokens = tokenizer.convert_ids_to_tokens(encoded[0]["input_ids"][0].tolist())
    return Findings(layers, layer, tokens, weights[0][layer], norms[0][layer], len(sentences))


def show(findings: Findings, console: Console) -> None:
    """Print the comparison, and the first sentence shaded by weight and by norm."""
    best = findings.layers[findings.layer]
    introduction = (
        f"{DEFAULT_MODEL}, {findings.sentences} captions. For each layer: how much attention weight a query gives to "
        "[CLS] and to all ordinary tokens together, and how long the vectors are that it receives from them.\n"
    )
    conclusion = (
        f"\n{_WEIGHT}, {_NORM}: per head, summed over the keys of the group (ordinary: all but [CLS] and [SEP]); mean "
        f"over heads, queries and sentences.\nIn layer {findings.layer} [CLS] gets {best.cls_weight:.0%} of the weight "
        f"but gives {best.cls_norm / (best.cls_norm + best.ordinary_norm):.0%} of the norm that comes from it and the "
        "ordinary tokens.\n"
    )
    console.print(Text(introduction), _table(findings), Text(conclusion), sep="\n")
    for name, maps in ((_WEIGHT, findings.weights), (_NORM, findings.norms)):
        console.print(Text(f"Layer {findings.layer} by {name}, mean over heads and queries:"))
        show_tokens(console, findings.tokens, maps.mean(0).tolist(), unit=name)
        console.print()


def draw(findings: Findings) -> "Figure":
    """Draw both maps of the first sentence side by side."""
    panels = [
        Panel("attention weights, mean over heads", findings.weights, _WEIGHT),
        Panel("norms of the weighted vectors, mean over heads", findings.norms, _NORM),
    ]
    return draw_heatmaps(panels, findings.tokens, title=f"{DEFAULT_MODEL}, layer {findings.layer}")


def _received(maps: Tensor, keys: slice) -> Tensor:
    """The total over a group of keys, mean over queries: (L, S, S) -> (L,)."""
    return maps[:, :, keys].sum(-1).mean(-1)


def _mean(measured: Sequence[Tensor]) -> list[float]:
    values: list[float] = (sum(measured, start=measured[0].new_zeros(())) / len(measured)).tolist()
    return values


def _table(findings: Findings) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layer", f"[CLS]\n{_WEIGHT}", f"[CLS]\n{_NORM}", f"ordinary\n{_WEIGHT}", f"ordinary\n{_NORM}"):
        table.add_column(Text(name), justify="right")  # no markup
    for index, layer in enumerate(findings.layers):
        values = (layer.cls_weight, layer.cls_norm, layer.ordinary_weight, layer.ordinary_norm)
        style = "bold" if index == findings.layer else None
        table.add_row(str(index), *(f"{value:.2f}" for value in values), style=style)
    return table
