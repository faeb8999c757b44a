"""Norms of any size are right or refused, and no method returns NaN or infinity."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from captum import attr
from torch import Tensor, nn

import captum_norm as cn
from alignment import gradients
from captum_norm.attr import layer_maps
from captum_norm.errors import NonFiniteError
from captum_norm.lab.evaluation import Perturbation
from captum_norm.models import Scope
from tests import encoder_decoders, families, feed_forwards, oracle
from tests.attr.test_alti import direct
from tests.attr.test_cancelling import SCOPES

LEAST = 1e-30
SIZES = (1e-12, 1e-22, 1e-26, 1e-29)


def scaled(name: str, scale: float, *parts: str) -> Any:
    """A model some of whose weights are scaled."""
    model = families.build(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if any(part in key for part in parts):
                parameter.mul_(scale)
    return model


def small_values(name: str, scale: float) -> Any:
    if name != "gpt2":
        return scaled(name, scale, "value.weight", "value.bias", "v_proj")
    model = scaled(name, 1.0)
    with torch.no_grad():
        for layer in model.transformer.h:
            layer.attn.c_attn.weight[:, 64:] *= scale
            layer.attn.c_attn.bias[64:] *= scale
            layer.attn.c_proj.bias.zero_()
    return model


def small_weights(name: str, scale: float) -> Any:
    """Sharp attention: some keys of a query have next to no weight."""
    factor = torch.tensor(scale).log().abs().item() / 2
    return scaled(name, factor, "query.weight", "q_proj", "q_norm")


# A logit of size 60 is rounded by 4e-6, which its weight then is off by, in the model as in the oracle's run of it.
TOLERANCE: dict[Any, float] = {small_values: 1e-5, small_weights: 1e-4}


def relatively_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Each entry for itself, down to the least size."""
    assert actual.isfinite().all()
    counts = expected.abs() > LEAST
    error = (actual.double() - expected).abs()[counts] / expected.abs()[counts]
    assert (error < tolerance).all()
    assert (actual[~counts] <= 2 * LEAST).all()


@pytest.mark.few
@pytest.mark.parametrize("name", SCOPES)
@pytest.mark.parametrize("make", [small_values, small_weights])
def test_norms_keep_their_digits(name: str, make: Callable[[str, float], Any]) -> None:
    for scale in SIZES if make is small_values or name == "bert" else SIZES[2:3]:
        if make is small_weights and name == "gpt2":
            continue  # its queries, keys and values are one matrix
        model, inputs = make(name, scale), families.inputs(name)
        exact = oracle.layers(families.FAMILIES[name], model, inputs)
        found = families.measured(model, inputs, scopes=SCOPES[name], head_norms=True)
        vectors = [oracle.vectors_per_head(layer.weights, layer.values, layer.projection) for layer in exact]
        relatively_near(found.head_norms, torch.stack([parts.norm(dim=-1) for parts in vectors], 1), TOLERANCE[make])
        for scope in SCOPES[name]:
            carried = torch.stack([layer.vectors(scope)[0] for layer in exact], 1)
            relatively_near(found.norms[scope], carried.norm(dim=-1), TOLERANCE[make])
            ratios = torch.stack([oracle.mixing_ratio(parts) for parts in carried.unbind(1)], 1)
            assert (found.mixing_ratio[scope] - ratios).abs().max() < TOLERANCE[make]
        assert found.convergence_delta.max() < 1e-5
        alone = families.measured(model, inputs, scopes=["attn"], maps=False, head_norms=True)
        transformed = [torch.einsum("bhkd,hde->bhke", layer.values, layer.projection).norm(dim=-1) for layer in exact]
        relatively_near(alone.transformed_norms, torch.stack(transformed, 1))


@pytest.mark.parametrize("scale", SIZES)
def test_norms_through_whole_layers_keep_their_digits(scale: float) -> None:
    model, inputs = small_values("bert", scale), families.inputs("bert")
    relatively_near(cn.GlobEnc(model).maps(inputs).self_attention, direct("bert", model, inputs))
    for name in ("bert", "llama"):
        model, inputs = small_values(name, scale), families.inputs(name)
        scopes: tuple[Scope, ...] = ("atb_ff", "atb_ff_res")
        found = families.measured(model, inputs, scopes=scopes)
        exact = feed_forwards.vectors(name, model, inputs)
        for scope in scopes:
            expected = torch.stack([layer[scope][0].norm(dim=-1) for layer in exact], 1)
            relatively_near(found.norms[scope], expected, 1e-4)  # activations cancel in what reaches the output


def test_heads_without_scopes_of_their_own_are_checked_by_themselves() -> None:
    """Behind the feed-forward network alone no sum over heads is formed, so none is compared."""
    model, inputs = families.build("bert"), families.inputs("bert")
    both = families.measured(model, inputs, scopes=["attn", "atb_ff_res"], head_norms=True)
    torch.full((2**20,), torch.nan)  # what is not written must not be read
    found = families.measured(model, inputs, scopes=["atb_ff_res"], head_norms=True)
    torch.testing.assert_close(found.norms["atb_ff_res"], both.norms["atb_ff_res"])
    torch.testing.assert_close(found.head_norms, both.head_norms)


@pytest.mark.parametrize("scale", [1e15, 1e20, 1e25, 1e30])
def test_large_norms_are_right_or_refused(scale: float) -> None:
    ids = families.inputs("llama")
    for part in ("v_proj", "o_proj", "embed_tokens"):
        model = scaled("llama", scale, part)
        exact = oracle.layers(families.FAMILIES["llama"], model, ids)
        cases: list[tuple[list[int] | None, Scope]] = [([0], "attn"), ([0], "atb"), (None, "atb")]
        for layers, scope in cases:
            try:
                found = families.measured(model, ids, scopes=[scope], layers=layers)
            except (NonFiniteError, cn.UnsupportedModelError):
                continue  # in the model's own norms squares overflow, which gives zeros that have no structure
            expected = torch.stack(
                [layer.vectors(scope)[0].norm(dim=-1) for layer in exact[: 1 if layers else None]], 1
            )
            relatively_near(found.norms[scope], expected)
            residual = torch.stack([layer.residual.norm(dim=-1) for layer in exact], 1)[:, : 1 if layers else None]
            relatively_near(found.residual_norm, residual)


def infinite_gain() -> Any:
    model = families.build("gpt2")
    model.transformer.h[1].ln_2.weight.data[3] = torch.inf
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "half precision": lambda: scaled("gpt2", 2e3, "c_fc.weight").half(),
    "infinite gain": infinite_gain,
    "large embeddings": lambda: scaled("llama", 1e38, "embed_tokens"),
    "large network": lambda: scaled("llama", 1e38, "down_proj"),
    "large values": lambda: scaled("gpt2", 1e38, "c_attn.weight"),
    "large projection": lambda: scaled("llama", 1e38, "o_proj"),
}
METHODS: dict[str, Callable[[Any, Tensor], Any]] = {
    "norms": lambda model, ids: cn.NormAttribution(model).attribute(ids, return_convergence_delta=True),
    "norms with residual": lambda model, ids: cn.NormAttribution(model, "attn_res").maps(ids),
    "attention block": lambda model, ids: cn.AttentionBlockAttribution(model).maps(ids),
    "feed-forward": lambda model, ids: cn.AttentionBlockAttribution(model, "atb_ff_res").maps(ids),
    "measurements": lambda model, ids: cn.NormMeter(model).measure(ids, scopes=["attn", "atb"], head_norms=True),
    "without maps": lambda model, ids: cn.NormMeter(model).measure(ids, scopes=["attn"], maps=False, head_norms=True),
    "weights": lambda model, ids: cn.AttentionWeights(model).maps(ids),
    "rollout": lambda model, ids: cn.AttentionRollout(model).maps(ids),
    "alti": lambda model, ids: cn.ALTI(model).maps(ids),
    "value zeroing": lambda model, ids: cn.ValueZeroing(model).maps(ids),
    "gradient": lambda model, ids: cn.AttentionTimesGradient(model).attribute(ids, 1),
    "gradient maps": lambda model, ids: cn.AttentionTimesGradient(model).maps(ids, target=1),
    "decompx": lambda model, ids: cn.DecompX(model).decompose(ids, 1),
    "decompx maps": lambda model, ids: cn.DecompX(model).maps(ids),
    "decompx, norm": lambda model, ids: cn.DecompX(model, "norm").maps(ids),
    "saliency": lambda model, ids: cn.TokenAttribution(model, attr.Saliency).attribute(ids, 1),
    "integrated gradients": lambda model, ids: cn.TokenAttribution(
        model, attr.IntegratedGradients, n_steps=4
    ).attribute(ids, 1, return_convergence_delta=True),
    "perturbation": lambda model, ids: Perturbation(model, "zero", keep_special=False).bind(ids).leave_one_out(),
}


# A norm whose squares overflow gives zeros, of which no structure can be told.
EXPECTED = {name: (NonFiniteError, cn.UnsupportedModelError) for name in MODELS if name.startswith("large")}
# Attention ends before the norm with the infinite gain, which is in the last layer.
FINITE = {"weights", "rollout", "alti", "norms", "norms with residual", "attention block"}
FINITE |= {"measurements", "without maps"}
REFUSED: dict[str, set[str]] = {name: set() for name in MODELS} | {
    "half precision": {"gradient", "gradient maps", "decompx", "decompx maps", "decompx, norm"},
    "infinite gain": METHODS.keys() - FINITE,
}


def tensors(results: Any) -> Iterator[Tensor]:
    if isinstance(results, Tensor):
        yield results
    elif isinstance(results, (tuple, dict)):
        for entry in results.values() if isinstance(results, dict) else results:
            yield from tensors(entry)
    elif hasattr(results, "__dict__"):
        yield from tensors(vars(results))


@pytest.mark.few
@pytest.mark.parametrize("name", MODELS)
def test_results_are_finite_or_refused(name: str) -> None:
    model, ids = MODELS[name](), torch.tensor([[5, 9, 7, 3, 8]])
    refused = set()
    for method, explain in METHODS.items():
        try:
            found = list(tensors(explain(model, ids)))
        except EXPECTED.get(name, NonFiniteError):
            refused.add(method)
        else:
            assert found, method
            assert all(bool(tensor.isfinite().all()) for tensor in found), method
    assert refused >= REFUSED[name]


def test_weights_behind_an_output_that_is_not_finite_are_named() -> None:
    model, ids = infinite_gain(), torch.tensor([[5, 9, 7, 3, 8]])
    for explain in (cn.DecompX(model).decompose, cn.AttentionTimesGradient(model).attribute):
        with pytest.raises(NonFiniteError, match=r'the weight "transformer\.h\.1\.ln_2\.weight"'):
            explain(ids, 1)


def test_numbers_at_padding_are_nobodys() -> None:
    """What a model makes of padded positions alone is in no result."""
    model, ids, mask = families.build("bert"), torch.tensor([[5, 9, 7, 0]]), torch.tensor([[1, 1, 1, 0]])
    others = (cn.AttentionWeights, cn.AttentionRollout, cn.ALTI)
    methods: list[Any] = [cn.NormAttribution(model, "attn_res_ln"), *(kind(model) for kind in others)]
    methods += [cn.AttentionBlockAttribution(model, "atb_ff_res_ln"), cn.GlobEnc(model)]
    expected = [method.maps(ids, mask).self_attention for method in methods]
    last = model.encoder.layer[1].output
    last.register_forward_hook(lambda _, __, output: output.masked_fill(mask[..., None] == 0, torch.nan))
    assert model(ids, mask).last_hidden_state.isnan().any()
    for method, before in zip(methods, expected, strict=True):
        torch.testing.assert_close(method.maps(ids, mask).self_attention, before)


class NoDelta(attr.IntegratedGradients):
    """Attributions that are finite, with a delta that is none."""

    def attribute(self, inputs: Tensor, *, return_convergence_delta: bool = False, **options: Any) -> Any:
        inherited: Any = super()
        found = inherited.attribute(inputs, **options)
        return (found, torch.full((len(inputs),), torch.nan)) if return_convergence_delta else found


def test_a_convergence_delta_of_captum_is_a_number() -> None:
    method, ids = cn.TokenAttribution(families.build("gpt2"), NoDelta), torch.tensor([[5, 9, 7]])
    assert method.attribute(ids, 1).isfinite().all()
    with pytest.raises(NonFiniteError, match="for GPT2LMHeadModel contains NaN or infinity"):
        method.attribute(ids, 1, return_convergence_delta=True)


def test_sums_that_overflow_are_looked_at_again() -> None:
    large = torch.full((3,), 3e38)
    assert layer_maps.finite_results(nn.Identity(), (large, None, {"a": large})) == (large, None, {"a": large})
    for bad in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(NonFiniteError, match=r"^a for Identity contains NaN"):
            layer_maps.finite_results(nn.Identity(), {"a": torch.tensor([1.0, bad]), "b": large})
    with pytest.raises(NonFiniteError, match=r"^a result for Identity contains NaN"):
        layer_maps.finite_results(nn.Identity(), torch.tensor([torch.inf, -torch.inf]))


def test_gradients_of_translation_models_are_numbers() -> None:
    model = encoder_decoders.build("marian")
    inputs: dict[str, Tensor] = dict(encoder_decoders.inputs("marian"))
    labels = inputs["decoder_input_ids"].clone()
    source = {name: inputs[name] for name in ("input_ids", "decoder_input_ids")}
    source["attention_mask"] = torch.ones_like(source["input_ids"])
    assert gradients.source_gradients(model, source, labels).isfinite().all()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1e38)
    with pytest.raises(NonFiniteError, match="the gradients of MarianMTModel contain"):
        gradients.source_gradients(model, source, labels)
