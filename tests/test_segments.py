"""Maps of segments and spans against vectors that are formed one by one in float64 and added."""

from typing import Any

import pytest
import torch
from torch import Tensor

import captum_norm as cn
from tests import encoder_decoders, families, oracle
from tests.encoder_decoders import ENCODER_DECODERS
from tests.families import EVERY, randomized
from tests.test_matrix import SCOPES
from tests.test_virtual_tokens import tuned

LENGTH, GROUPS = 11, 4
# Biases and LayerNorm behind or before; RMS norms and grouped queries; norms of the branch; a gate.
NAMES = ("bert", "gpt2", "llama", "gemma2", "qwen3-next")


def grouped(seed: int, batch: int, keys: int) -> Tensor:
    """Segments that are no intervals, others in each example, one of which may be empty, and keys in none."""
    return torch.randint(-1, GROUPS, (batch, keys), generator=torch.Generator().manual_seed(seed)).index_fill(
        1, torch.tensor([2]), GROUPS - 1
    )


def added(vectors: Tensor, numbers: Tensor, together: bool) -> Tensor:
    """Add vectors (B, Q, K, D) of each segment's keys, of all queries if they are together: (B, Q or 1, G, D)."""
    batch, queries, _, width = vectors.shape
    made = torch.zeros(batch, 1 if together else queries, GROUPS, width, dtype=torch.float64)
    for example, row in enumerate(numbers.tolist()):
        for query in range(queries):
            for key, number in enumerate(row):
                if number >= 0:
                    made[example, 0 if together else query, number] += vectors[example, query, key]
    return made


def method_of(model: Any, scope: Any) -> Any:
    return cn.AttentionBlockAttribution(model) if scope == "atb" else cn.NormAttribution(model, scope)


@pytest.mark.few
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_norms_are_those_of_sums_of_vectors(name: str, seed: int) -> None:
    model, ids = families.build(name, seed), families.inputs(name, seed, batch=2, length=LENGTH)
    numbers, layers = grouped(seed, 2, LENGTH), oracle.layers(EVERY[name], model, ids)
    for scope in SCOPES[EVERY[name].style]:
        for last, together in ((LENGTH, False), (4, False), (4, True)):
            found = method_of(model, scope).maps(ids, last=last, segments=numbers, together=together)
            assert found.segmented
            assert found.tokens is None
            maps = found.self_attention.double()
            assert maps.shape == (2, len(layers), 1 if together else last, GROUPS)
            for index, layer in enumerate(layers):
                vectors, _ = layer.vectors("attn_res_ln" if scope == "atb" else scope)
                expected = added(vectors[:, -last:], numbers, together).norm(dim=-1)
                assert expected.max() > 1e-2
                # The model's own function gives the positions before the last ones other rounding errors.
                atol = 1e-6 if last == LENGTH or index == 0 else 1e-5
                torch.testing.assert_close(maps[:, index], expected, rtol=atol, atol=atol * float(expected.max()))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "qwen3-next"])
def test_norms_of_heads_are_those_of_sums_of_their_vectors(name: str) -> None:
    model, ids = families.build(name), families.inputs(name, batch=2, length=LENGTH)
    numbers, layers = grouped(1, 2, LENGTH), oracle.layers(EVERY[name], model, ids)
    for last, together in ((LENGTH, False), (4, True)):
        found = cn.NormAttribution(model).maps(ids, last=last, segments=numbers, together=together, per_head=True)
        maps, heads = found.self_attention.double(), layers[0].weights.shape[1]
        assert maps.shape == (2, len(layers), heads, 1 if together else last, GROUPS)
        for index, layer in enumerate(layers):
            vectors = oracle.vectors_per_head(layer.weights, layer.values, layer.projection)
            if layer.gate is not None:
                parts = (layer.weights, layer.values, layer.gate, layer.projection)
                vectors = torch.einsum("bhqk,bhkd,bqhd,hde->bhqke", *parts)
            for head in range(heads):
                expected = added(vectors[:, head, -last:], numbers, together).norm(dim=-1)
                assert expected.max() > 1e-2
                torch.testing.assert_close(maps[:, index, head], expected, rtol=1e-5, atol=1e-5 * float(expected.max()))


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_nearness_is_that_of_sums_of_vectors(name: str) -> None:
    model, ids = families.build(name), families.inputs(name, batch=2, length=LENGTH)
    numbers = grouped(3, 2, LENGTH)
    rest = numbers.masked_fill(numbers >= 0, -1) + 1  # segment 0 is what no segment holds
    for last, together in ((LENGTH, False), (3, True)):
        maps = cn.ALTI(model).maps(ids, last=last, segments=numbers, together=together).self_attention.double()
        for index, layer in enumerate(oracle.layers(EVERY[name], model, ids)):
            vectors, constant = layer.vectors("attn_res_ln")
            whole = (vectors.sum(2) + constant)[:, -last:]
            whole = whole.sum(1, keepdim=True) if together else whole
            parts = added(vectors[:, -last:], numbers, together)
            beside = added(vectors[:, -last:], rest.where(numbers < 0, -1), together)[:, :, :1]
            distances = (whole.unsqueeze(2) - torch.cat([parts, beside], 2)).abs().sum(-1)
            near = (whole.abs().sum(-1, keepdim=True) - distances).clamp(min=0)
            expected = (near / near.sum(-1, keepdim=True))[..., :GROUPS]
            assert (expected.sum(-1) < 1).any()
            torch.testing.assert_close(maps[:, index], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_segments_of_single_keys_are_keys(name: str) -> None:
    """In all stacks of an encoder–decoder model; and a span of one position is its row."""
    model, inputs = randomized(ENCODER_DECODERS[name].build, 0, torch.float64), encoder_decoders.masked_inputs()
    mask = inputs["attention_mask"]
    for method in (cn.NormAttribution(model), cn.AttentionBlockAttribution(model), cn.ALTI(model)):
        whole: Any = method.maps(inputs)
        for stack, keys in (("encoder", 6), ("decoder", 7), ("cross", 6)):
            numbers = torch.arange(keys).expand(2, -1)
            found = getattr(method.maps(inputs, stacks=[stack], segments=numbers), stack)
            expected = getattr(whole, stack)
            real = mask.bool()[:, None, :, None] if stack == "encoder" else torch.tensor(True)
            torch.testing.assert_close(found.where(real, 0), expected, rtol=0, atol=1e-9)
        for given in ({"together": True}, {"segments": torch.arange(6).expand(2, -1)}):
            options: dict[str, Any] = {"last": 1, **given}
            found = method.maps(inputs, stacks=["cross"], **options).cross
            torch.testing.assert_close(found, whole.cross[:, :, -1:], rtol=0, atol=1e-6)


def test_any_budget_gives_the_same() -> None:
    model, ids = families.build("gemma2", dtype=torch.float64), families.inputs("gemma2", batch=2, length=LENGTH)
    for kind in (cn.AttentionBlockAttribution, cn.ALTI):
        cases: list[dict[str, Any]] = [{"segments": grouped(0, 2, LENGTH)}, {"together": True, "last": 5}]
        for asked in cases:
            whole, pieces = (kind(model, memory_budget=budget).maps(ids, **asked).decoder for budget in (None, 1))
            torch.testing.assert_close(pieces, whole, rtol=1e-11, atol=1e-13)


def test_keys_of_virtual_tokens_are_numbered_too() -> None:
    model, ids = tuned("gpt2", "prefix"), families.inputs("gpt2", batch=2, length=LENGTH)
    whole = cn.NormAttribution(model).maps(ids)
    numbers = torch.arange(whole.self_attention.shape[-1]).expand(2, -1)
    found = cn.NormAttribution(model).maps(ids, segments=numbers)
    torch.testing.assert_close(found.decoder, whole.decoder, rtol=0, atol=1e-10)


def test_gradients_flow() -> None:
    model = families.build("llama", dtype=torch.float64)
    embedded = model.get_input_embeddings()(families.inputs("llama", batch=1, length=5)).detach().requires_grad_()
    for kind in (cn.AttentionBlockAttribution, cn.ALTI):
        method = kind(model, differentiable=True)
        maps = method.maps(embedded, last=2, segments=torch.tensor([[0, 0, 1, 1, -1]]), together=True).self_attention
        (gradient,) = torch.autograd.grad(maps[..., 0].sum(), embedded)
        step = torch.randn(embedded.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-5
        with torch.no_grad():
            ends = [
                method.maps(embedded + sign * step, last=2, segments=torch.tensor([[0, 0, 1, 1, -1]]), together=True)
                for sign in (1, -1)
            ]
            difference = (ends[0].self_attention[..., 0] - ends[1].self_attention[..., 0]).sum() / 2
        torch.testing.assert_close((gradient * step).sum(), difference, rtol=1e-2, atol=1e-8)


def test_what_is_refused() -> None:
    model, ids = families.build("bert"), families.inputs("bert", batch=2, length=LENGTH)
    numbers = torch.zeros_like(ids)
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    padded = {"input_ids": ids, "attention_mask": mask}
    method = cn.NormAttribution(model)
    wrong: list[Any] = [numbers[:1], numbers.float(), numbers[0], [[0]], numbers - 2, numbers - 1]
    refused: list[tuple[Any, Any, dict[str, Any], str]] = [
        *((method, ids, {"segments": segments}, "got segments") for segments in wrong),
        (method, ids, {"segments": numbers[:, 1:]}, "segments of 10 positions for a layer with 11 keys"),
        (cn.AttentionBlockAttribution(model), ids, {"segments": numbers, "per_head": True}, "per_head"),
        (method, ids, {"together": 1}, "together"),
        (method, padded, {"segments": numbers}, "segments and padding"),
        (cn.AttentionBlockAttribution(model, "atb_ff_res"), ids, {"segments": numbers}, 'scope "atb_ff_res"'),
        (cn.GlobEnc(model), ids, {"together": True}, "got together=True; GlobEnc"),
        (cn.DecompX(model), ids, {"segments": numbers}, "DecompX has no vectors to add"),
        (cn.AttentionWeights(model), ids, {"segments": numbers}, "AttentionWeights has no vectors to add"),
    ]
    for explain, inputs, options, message in refused:
        with pytest.raises(cn.InvalidInputError, match=message):
            explain.maps(inputs, **options)
    with pytest.raises(cn.InvalidInputError, match="maps of segments"):
        method.scores(method.maps(ids, segments=numbers))
    bart = ENCODER_DECODERS["bart"].build().eval()
    pair = {"input_ids": ids[:, :6] % 40, "decoder_input_ids": ids[:, :6] % 40}
    with pytest.raises(cn.InvalidInputError, match='stacks=\\["cross"\\]'):
        cn.NormAttribution(bart).maps(pair, segments=numbers[:, :6])
