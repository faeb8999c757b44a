"""Nothing of a call survives it, and a model is freed with the last one who holds it, before garbage is collected."""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from captum.attr import IntegratedGradients, Occlusion
from torch import Tensor

import captum_norm as cn
from captum_norm.errors import IncompleteDecompositionError
from tests.families import TEXT
from tests.families.family import new
from tests.generation.texts import ANSWER, PROMPT, tokenizer

IDS = torch.tensor([[5, 7, 9, 3]])
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Tensor]]] = {
    "classifier": (new("BertForSequenceClassification", **TEXT), {"input_ids": IDS}),
    "language model": (new("LlamaForCausalLM", **TEXT), {"input_ids": IDS}),
    "encoder-decoder": (
        new("T5ForConditionalGeneration", d_model=24, d_kv=6, d_ff=48, num_layers=2, num_heads=4, vocab_size=60),
        {"input_ids": IDS, "decoder_input_ids": IDS[:, :3]},
    ),
}
EXPLAINED: dict[str, Any] = {"target": 1}
# How a method is made, what is called, and with what beside inputs.
CALLS: dict[str, tuple[Callable[[Any], Any], str, dict[str, Any]]] = {
    "norm": (cn.NormAttribution, "maps", {}),
    "norm, differentiable": (partial(cn.NormAttribution, differentiable=True), "maps", {}),
    "attention-block": (partial(cn.AttentionBlockAttribution, scope="atb_ff_res"), "maps", {}),
    "globenc": (cn.GlobEnc, "attribute", {}),
    "alti": (cn.ALTI, "attribute", {}),
    "value-zeroing": (cn.ValueZeroing, "attribute", {}),
    "weights": (cn.AttentionWeights, "maps", {}),
    "rollout": (cn.AttentionRollout, "attribute", {}),
    "information-flow": (cn.InformationFlow, "graphs", {}),
    "attention-gradient": (cn.AttentionTimesGradient, "attribute", EXPLAINED),
    "alti-logit": (cn.ALTILogit, "decompose", EXPLAINED),
    "updates": (cn.ALTILogit, "logit_updates", EXPLAINED),
    "decompx": (cn.DecompX, "decompose", EXPLAINED),
    "decompx, propagated": (partial(cn.DecompX, propagate=True), "decompose", EXPLAINED),
    "decompx, maps": (cn.DecompX, "maps", {}),
    "cp-lrp": (cn.CPLRP, "decompose", EXPLAINED),
    "attnlrp": (cn.AttnLRP, "decompose", EXPLAINED),
    "gim": (cn.GIM, "decompose", {"target": [[0, 1]]}),
    "integrated gradients": (
        lambda model: cn.TokenAttribution(model, IntegratedGradients, n_steps=3),
        "attribute",
        EXPLAINED,
    ),
    "occlusion": (lambda model: cn.TokenAttribution(model, Occlusion), "attribute", EXPLAINED),
}
# GlobEnc needs post-norm layers, and with others one stack; that of T5's decoder has no feed-forward network.
WITHOUT = {
    "language model": {"globenc"},
    "encoder-decoder": {"attention-block", "globenc", "information-flow", "integrated gradients", "occlusion"},
}
SHORT = {"norm", "alti-logit", "decompx", "attnlrp"}
CASES = [
    pytest.param(kind, name, marks=() if kind == "classifier" or name in SHORT else pytest.mark.long)
    for kind in MODELS
    for name in CALLS
    if name not in WITHOUT.get(kind, ())
]


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Leaves freeing to reference counts, and out of :func:`tensors` what was there before."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def tensors() -> list[Tensor]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def expect_nothing_left(call: Callable[[], object], times: int = 3) -> None:
    """Expect no graph after a call, nor more tensors after several."""
    counts = []
    for _ in range(1 + times):
        call()
        assert not any(tensor.grad_fn for tensor in tensors())
        gc.collect()
        counts.append(len(tensors()))
    assert counts[1:] == counts[1:2] * times


def prepared(kind: str, name: str) -> tuple[Any, dict[str, Tensor], Callable[[Any], object]]:
    """A model, its inputs, and the call of a method with inputs."""
    (make, inputs), (method, called, options) = MODELS[kind], CALLS[name]
    model = make().eval()
    return model, inputs, partial(getattr(method(model), called), **options)


@pytest.mark.few
@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.usefixtures("uncollected")
def test_model_and_graphs_are_freed(kind: str, name: str) -> None:
    model, inputs, call = prepared(kind, name)
    expect_nothing_left(partial(call, inputs), 20 if name == "attnlrp" else 3)
    alive = ref(model)
    del model, call
    assert alive() is None


@pytest.mark.few
@pytest.mark.parametrize("method", [cn.NormAttribution, cn.DecompX, cn.AttnLRP, "integrated-gradients"])
@pytest.mark.usefixtures("uncollected")
def test_explain_and_generation_keep_nothing(method: Any) -> None:
    model = new("LlamaForCausalLM", **TEXT | {"vocab_size": len(tokenizer())})().eval()
    expect_nothing_left(partial(cn.explain, PROMPT, model, tokenizer(), method=getattr(method, "name", method)))
    if not isinstance(method, str):
        expect_nothing_left(partial(cn.GenerationAttribution(method(model), tokenizer()).attribute, PROMPT, ANSWER))
    alive = ref(model)
    del model
    assert alive() is None


@pytest.mark.few
@pytest.mark.parametrize("name", ["norm", "decompx", "attnlrp", "alti-logit"])
@pytest.mark.parametrize("kind", MODELS)
def test_model_is_freed_after_an_exception(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, call = prepared(kind, name)
    call(inputs)
    with pytest.raises(cn.InvalidInputError):
        call({key: value + 60 for key, value in inputs.items()})
    for module in ("attr.output", "attr.layer_maps"):
        nothing_accepted = dict.fromkeys([torch.float32, torch.float64], -1.0)
        monkeypatch.setattr(f"captum_norm.{module}.TOLERANCE", nothing_accepted)
    with pytest.raises(IncompleteDecompositionError):
        call(inputs)
    alive = ref(model)
    del model, call
    gc.collect()
    assert alive() is None
