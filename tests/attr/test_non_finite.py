"""No method returns NaN or infinity: results are finite, or a NonFiniteError says that they are not."""

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
from tests import encoder_decoders, families
from tests.attr.test_sizes import scaled


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
