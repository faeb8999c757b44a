"""Norms of any size: relative to each other right down to 1e-30, and right or refused where they are large."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm import GlobEnc, UnsupportedModelError
from captum_norm.errors import NonFiniteError
from captum_norm.models import Scope
from tests import families, feed_forwards, oracle
from tests.attr.test_cancelling import SCOPES
from tests.attr.test_globenc import direct

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
    relatively_near(GlobEnc(model).maps(inputs).self_attention, direct("bert", model, inputs))
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
            except (NonFiniteError, UnsupportedModelError):
                continue  # in the model's own norms squares overflow, which gives zeros that have no structure
            expected = torch.stack(
                [layer.vectors(scope)[0].norm(dim=-1) for layer in exact[: 1 if layers else None]], 1
            )
            relatively_near(found.norms[scope], expected)
            residual = torch.stack([layer.residual.norm(dim=-1) for layer in exact], 1)[:, : 1 if layers else None]
            relatively_near(found.residual_norm, residual)
