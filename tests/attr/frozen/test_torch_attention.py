"""Rule sets on models of torch.nn's attention, against relevance and vectors by hand, in float64."""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import GELUActivation

from captum_norm import DecompX, InvalidInputError, UnsupportedModelError
from captum_norm.errors import IncompleteDecompositionError
from tests.attr.frozen.decompx_by_hand import ByHand, start
from tests.attr.frozen.relevance_by_hand import heads, merged, relevance
from tests.attr.frozen.relevance_rules import Rules
from tests.attr.frozen.test_decompx import SHARINGS
from tests.attr.frozen.test_relevance import METHODS, every_method, expect, near
from tests.test_torch_models import Reader
from tests.torch_models import (
    HEADS,
    VOCABULARY,
    WIDTH,
    Classifier,
    PlacedBlock,
    Pooled,
    Translator,
    VisionBlock,
    causal,
    ids,
    padding,
    randomized,
)

# What torch says of its own defaults.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")

# Batch first, norm first, activation, biases.
STYLES = [
    (True, False, "relu", True),
    (True, True, "gelu", True),
    (False, False, "gelu", True),
    (False, True, "relu", True),
    (True, False, "gelu", False),
]
every_style = pytest.mark.parametrize(("seed", "style"), list(enumerate(STYLES)), ids=str)
both_orders = pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "sequence first"])
LENGTHS = (7, 4, 2)
PADDED = padding(*LENGTHS)
KINDS: dict[str, Callable[[Any], Any]] = {
    **METHODS,
    "decompx": DecompX,
    "propagated": lambda model: DecompX(model, propagate=True),
    "shared": lambda model: DecompX(model, "absdot"),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


class First(Classifier):
    """Reads the first position."""

    def forward(self, ids: Tensor, padding_mask: Tensor | None = None, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        hidden = self.encoder(self.embed(ids), mask, padding_mask)
        return self.head(hidden.select(self.axis, 0))  # type: ignore[no-any-return]


def built(kind: Any, seed: int, style: tuple[bool, bool, str, bool]) -> Any:
    names = ("batch_first", "norm_first", "activation", "bias")
    return randomized(kind(**dict(zip(names, style, strict=True))), seed, torch.float64)


def projections(attention: Any) -> list[Any]:
    """The linear maps to queries, keys and values, which torch keeps in one."""
    biases = [None] * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)
    weights = attention.in_proj_weight.chunk(3)
    return [SimpleNamespace(weight=w, bias=b) for w, b in zip(weights, biases, strict=True)]


def attended(rules: Rules, attention: Any, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """Attention's output, (B, Q, D), from tensors with the batch first and where queries may look."""
    q, k, v = (
        heads(rules.linear(given, module), HEADS)
        for given, module in zip((query, key, value), projections(attention), strict=True)
    )
    mixed = rules.attention(q, k, v, allowed, 1 / math.sqrt(q.shape[-1]))
    return rules.linear(merged(mixed), attention.out_proj)


def carried(rules: Rules, stack: Any, stream: Tensor, allowed: Tensor, *memory: Tensor) -> Tensor:
    """A stream, (B, S, D), through an encoder or, over a memory and where it is real, a decoder."""

    def steps(layer: Any) -> Iterator[Callable[[Tensor], Tensor]]:
        yield lambda read: attended(rules, layer.self_attn, read, read, read, allowed)
        if memory:
            yield lambda read: attended(rules, layer.multihead_attn, read, memory[0], *memory)
        yield lambda read: rules.linear(
            rules.active(rules.linear(read, layer.linear1), layer.activation), layer.linear2
        )

    for layer in stack.layers:
        for index, step in enumerate(steps(layer), 1):
            norm = getattr(layer, f"norm{index}")
            if layer.norm_first:
                stream = rules.add(stream, step(rules.norm(stream, norm)))
            else:
                stream = rules.norm(rules.add(stream, step(stream)), norm)
    return stream if stack.norm is None else rules.norm(stream, stack.norm)


def ordered(model: Any, tokens: Tensor) -> Tensor:
    """The tokens, (B, S), in the order that a model takes."""
    attention = next(module for module in model.modules() if isinstance(module, nn.MultiheadAttention))
    return tokens if attention.batch_first else tokens.T


@every_method
@every_style
def test_an_encoder_equals_rules_by_hand(name: str, seed: int, style: Any) -> None:
    model, tokens = built(First, seed, style), ids(3, 7, seed=seed)
    found = METHODS[name](model).decompose((ordered(model, tokens), PADDED), 2)
    embedded = model.embed(ordered(model, tokens))
    stream = embedded if model.axis else embedded.transpose(0, 1)

    def run(stream: Tensor) -> Tensor:
        rules = Rules(name)
        states = carried(rules, model.encoder, stream, ~PADDED[:, None, None])
        return rules.linear(states[:, 0], model.head)[:, 2]

    scores, number = relevance(stream, run)
    near(found.scores, scores)
    near(found.number, model(ordered(model, tokens), PADDED)[:, 2], 1e-12)
    near(found.bias, number - scores.sum(1))
    assert found.convergence_delta.max() < 1e-11


def parts_by_hand(model: Any, tokens: Tensor, sharing: str) -> tuple[list[Tensor], Tensor]:
    """The parts of each layer's output, (S, K + 1, D), and of the first position's logits, of one example."""
    step, embedded = ByHand(sharing), model.embed(ordered(model, tokens))
    parts, states = start(embedded.flatten(0, 1)), []

    def attended(read: Tensor, attention: Any) -> Tensor:
        query, key, value = projections(attention)
        q, k = (heads(F.linear(read.sum(1), to.weight, to.bias)[None], HEADS)[0] for to in (query, key))
        weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).softmax(-1)
        return step.attention(read, weights, value, attention.out_proj)

    def fed_forward(read: Tensor, layer: Any) -> Tensor:
        return step.affine(step.activation(step.affine(read, layer.linear1), layer.activation), layer.linear2)

    for layer in model.encoder.layers:
        if layer.norm_first:
            parts = parts + attended(step.norm(parts, layer.norm1), layer.self_attn)
            parts = parts + fed_forward(step.norm(parts, layer.norm2), layer)
        else:
            parts = step.norm(parts + attended(parts, layer.self_attn), layer.norm1)
            parts = step.norm(parts + fed_forward(parts, layer), layer.norm2)
        states.append(parts)
    return states, step.affine(parts[:1], model.head)[0]


@pytest.mark.few
@every_style
@torch.no_grad()
def test_parts_and_shared_biases_equal_vectors_by_hand(seed: int, style: Any) -> None:
    model, tokens = built(First, seed, style), ids(2, 6, seed=seed)
    given = ordered(model, tokens)
    for bias in ("apart", *SHARINGS):
        method: Any = DecompX(model, bias)
        found, maps = method.decompose(given, 2), method.maps(given).self_attention
        for example in range(2):
            states, logits = parts_by_hand(model, tokens[example : example + 1], bias)
            near(found.scores[example], logits[:-1, 2])
            near(found.bias[example : example + 1], logits[-1:, 2], 1e-9 if bias == "apart" else 0)
            for layer, parts in enumerate(states):
                near(maps[example, layer], parts[:, :-1].norm(dim=-1))
    near(found.number, model(given)[:, 2], 1e-12)


@pytest.mark.few
@every_kind
@pytest.mark.parametrize("style", STYLES[:4], ids=str)
def test_a_padded_batch_gives_what_its_examples_alone_give(kind: Any, style: Any) -> None:
    model, tokens = built(Pooled, 3, style), ids(3, 7)
    method = kind(model)
    found = method.decompose((ordered(model, tokens), PADDED), [0, 1, 2])
    near(found.number, model(ordered(model, tokens), PADDED)[range(3), range(3)], 1e-12)
    assert found.convergence_delta.max() < 1e-11
    for row, length in enumerate(LENGTHS):
        alone = method.decompose(ordered(model, tokens[row : row + 1, :length]), row)
        near(found.scores[row : row + 1, :length], alone.scores)
        assert not found.scores[row, length:].any()
        torch.testing.assert_close(found.bias[row : row + 1], alone.bias, rtol=1e-9, atol=1e-12)
    assert kind(model.float()).decompose((ordered(model, tokens), PADDED), 1).convergence_delta.max() < 1e-5


def test_padding_that_the_output_depends_on_is_named() -> None:
    model = randomized(Classifier(batch_first=True), dtype=torch.float64)
    for kind in KINDS.values():
        with pytest.raises(IncompleteDecompositionError, match="those of padding, which it reads"):
            kind(model).decompose((ids(3, 7), PADDED), 1)


@every_kind
@both_orders
def test_as_many_examples_as_positions_are_told_apart_or_refused(kind: Any, batch_first: bool) -> None:
    """Also after a call whose axes all had length one, from which nothing is known of their order."""
    model, tokens, real = built(Pooled, 0, (batch_first, False, "relu", True)), ids(4, 4), padding(4, 3, 3, 2)
    method = kind(model)
    if not isinstance(method, DecompX) or not method._propagate:
        method.decompose(ids(1, 1), 1)
        found = method.decompose((ordered(model, tokens), real), 1)
        expected = [method.decompose(ordered(model, tokens[i : i + 1, : 4 - i + i // 2]), 1) for i in range(4)]
        for row, alone in enumerate(expected):
            near(found.scores[row, : alone.scores.shape[1]], alone.scores[0])
            near(found.bias[row : row + 1], alone.bias)
        return
    with pytest.raises(InvalidInputError, match=r"4 examples of 4 positions.*one at a time"):
        method.decompose((ordered(model, tokens), real), 1)
    if not batch_first:
        with pytest.raises(UnsupportedModelError, match="pass an example of several positions"):
            method.decompose(ids(1, 1), 1)


MASKS = [causal(7), torch.randn(7, 7).double(), torch.randn(3 * HEADS, 7, 7).double()]


@pytest.mark.few
@both_orders
@pytest.mark.parametrize("mask", MASKS, ids=["causal", "summand", "for each head"])
def test_masks_of_all_kinds_are_the_models(mask: Tensor, batch_first: bool) -> None:
    model, tokens = built(First, 1, (batch_first, True, "relu", True)), ids(3, 7)
    arguments = {"ids": ordered(model, tokens), "mask": mask}
    found = {name: kind(model).decompose(arguments, 1) for name, kind in KINDS.items()}
    for parts in found.values():
        near(parts.number, model(**arguments)[:, 1], 1e-12)
        assert parts.convergence_delta.max() < 1e-11
    near(found["propagated"].scores, found["decompx"].scores)
    if mask is MASKS[0]:
        assert not any(parts.scores[:, 1:].any() for parts in found.values())


class Weighed(VisionBlock):
    """Asks for attention weights, which it then leaves."""

    def forward(self, stream: Tensor) -> Tensor:
        x = self.ln_1(stream)
        stream = stream + self.self_attention(x, x, x)[0]
        return stream + self.mlp(self.ln_2(stream))  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """Layers that call torch's attention, in a model that has modules of transformers, too."""

    def __init__(self, block: Any, bias: bool) -> None:
        super().__init__()
        self.embeddings, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(block(), block())
        layers: Any = self.layers
        for layer in layers:
            layer.self_attention = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True)
            layer.mlp[1] = GELUActivation()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embeddings(input_ids)))[:, 0])  # type: ignore[no-any-return]


@pytest.mark.few
@every_method
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("block", [VisionBlock, Weighed])
def test_rules_for_queries_and_keys_are_never_left_out(name: str, block: Any, bias: bool) -> None:
    """Sums would not show it: what the softmax gets is no part of them."""
    model, tokens = randomized(Mixed(block, bias), 0, torch.float64), ids(2, 6)

    def run(stream: Tensor) -> Tensor:
        rules = Rules(name)
        for layer in model.layers:
            read = rules.norm(stream, layer.ln_1)
            added = attended(rules, layer.self_attention, read, read, read, torch.ones(1, 1, 1, 6).bool())
            stream = rules.add(stream, added)
            hidden = rules.active(rules.linear(rules.norm(stream, layer.ln_2), layer.mlp[0]), F.gelu)
            stream = rules.add(stream, rules.linear(hidden, layer.mlp[3]))
        return rules.linear(rules.norm(stream, model.norm)[:, 0], model.head)[:, 1]

    expect(METHODS[name](model), tokens, 1, *relevance(model.embeddings(tokens), run))
    for kind in list(KINDS.values())[-2:]:
        assert kind(model).decompose(tokens, 1).convergence_delta.max() < 1e-11


class Placed(nn.Module):
    """Layers of one's own, over (S, B, D), whose values are projected from another tensor than queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(PlacedBlock(), PlacedBlock()), nn.Linear(WIDTH, 3)

    def forward(self, stream: Tensor) -> Tensor:
        return self.head(self.layers(stream)[0])  # type: ignore[no-any-return]


@every_method
def test_queries_and_keys_of_another_tensor_than_values_equal_rules_by_hand(name: str) -> None:
    model = randomized(Placed(), 0, torch.float64)
    stream = torch.randn(6, 2, WIDTH, dtype=torch.float64)

    def run(stream: Tensor) -> Tensor:
        rules = Rules(name)
        for layer in model.layers:
            # Positions are a bias, which keeps its share.
            placed = rules.add(stream, layer.places[:6, 0].expand_as(stream).detach())
            added = attended(rules, layer.attention, placed, placed, stream, torch.ones(1, 1, 1, 6).bool())
            stream = rules.norm(rules.add(stream, added), layer.norm1)
            stream = rules.norm(rules.add(stream, rules.linear(stream, layer.linear)), layer.norm2)
        return rules.linear(stream[:, 0], model.head)[:, 1]

    expect(METHODS[name](model), stream, 1, *relevance(stream.transpose(0, 1), run))
    assert DecompX(model, "norm").decompose(stream, 1).convergence_delta.max() < 1e-11


@pytest.mark.few
@both_orders
@every_method
def test_a_whole_transformer_equals_rules_by_hand(name: str, batch_first: bool) -> None:
    model = randomized(Translator(batch_first=batch_first, norm_first=batch_first), 2, torch.float64)
    source, target, padded = ids(3, 7), ids(3, 5, seed=1), padding(3, 5, 4)
    arguments = {
        "src": ordered(model, source),
        "trg": ordered(model, target),
        "tgt_mask": causal(5),
        "src_padding_mask": PADDED,
        "tgt_padding_mask": padded,
    }
    streams = [
        table(tokens).detach().requires_grad_() for table, tokens in ((model.source, source), (model.target, target))
    ]
    rules, transformer = Rules(name), model.transformer
    memory = carried(rules, transformer.encoder, streams[0], ~PADDED[:, None, None])
    seen = ~causal(5) & ~padded[:, None, None]
    states = carried(rules, transformer.decoder, streams[1], seen, memory, ~PADDED[:, None, None])
    numbers = rules.linear(states[:, 2], model.generator)[:, 5]
    expected = [part.sum(-1) for part in torch.autograd.grad(numbers, streams, numbers.detach())]

    def read(output: Tensor, _: Tensor) -> Tensor:
        return output.select(int(batch_first), 2)

    for kind in (
        METHODS[name],
        *([DecompX, lambda m, **o: DecompX(m, propagate=True, **o)] if name == "cp-lrp" else []),
    ):
        found = kind(model, readout=read).decompose(arguments, 5)
        for scores, by_hand in zip(found.scores, expected, strict=True):
            near(scores, by_hand)
        near(found.number, numbers.detach())
        near(found.bias, numbers.detach() - sum(part.sum(1) for part in expected))
    assert DecompX(model, "absdot", readout=read).decompose(arguments, 5).convergence_delta.max() < 1e-11


@every_kind
def test_a_decoder_alone_is_refused(kind: Any) -> None:
    inputs = torch.randn(2, 4, WIDTH), torch.randn(2, 5, 6), torch.randn(2, 5, 10)
    with pytest.raises(UnsupportedModelError, match=r"the encoder of Reader did not run.*whole encoder–decoder"):
        kind(randomized(Reader())).decompose(inputs, 1)
