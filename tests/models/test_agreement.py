"""What is explained is what runs, or an error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from captum_norm import (
    ALTI,
    AttentionTimesGradient,
    AttentionWeights,
    DecompX,
    NormAttribution,
    UnsupportedModelError,
    ValueZeroing,
)
from tests import families

NAME = "scaled_dot_product"
SDPA: Any = sdpa_attention_forward
METHODS: tuple[Any, ...] = (AttentionWeights, NormAttribution, ALTI, ValueZeroing, DecompX)


@contextmanager
def registered(attend: Any) -> Iterator[str]:
    """While open, an attention function has a name."""
    hf.AttentionInterface.register(NAME, attend)
    hf.AttentionMaskInterface.register(NAME, sdpa_mask)
    try:
        yield NAME
    finally:
        for interface in (hf.AttentionInterface, hf.AttentionMaskInterface):
            interface._global_mapping.pop(NAME)


@pytest.fixture(name="plain_attention")
def without_cap() -> Iterator[str]:
    """SDPA without the cap on scores, as it was in earlier versions of transformers."""

    def attend(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        output: tuple[Tensor, None] = SDPA(*tensors, **options | {"softcap": None})
        return output

    with registered(attend) as name:
        yield name


def gemma2(implementation: str, dtype: torch.dtype = torch.float32, /, **changes: Any) -> Any:
    """A Gemma 2 that caps its scores so much that it shows."""
    sizes: dict[str, Any] = (
        families.GROUPED | {"head_dim": 8, "attn_logit_softcapping": 0.05, "query_pre_attn_scalar": 1} | changes
    )
    config = hf.Gemma2Config(**sizes | {"attn_implementation": implementation})
    return families.randomized(lambda: hf.Gemma2ForCausalLM(config), 0, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_another_attention_function_than_the_one_that_runs_is_refused(plain_attention: str, dtype: torch.dtype) -> None:
    ids = families.inputs("gemma2")
    model, eager = gemma2(plain_attention, dtype), gemma2("eager", dtype)
    for method in METHODS:
        with pytest.raises(UnsupportedModelError, match=r'Gemma2ForCausalLM computes .*="eager"'):
            method(model).maps(ids)
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        AttentionTimesGradient(model).attribute(ids, target=3)
    assert NormAttribution(eager).maps(ids).decoder is not None
    # What the message says is to be done, on the same method.
    method = NormAttribution(model)
    with pytest.raises(UnsupportedModelError):
        method.maps(ids)
    model.set_attn_implementation("eager")
    assert method.maps(ids).decoder is not None
    model.set_attn_implementation(plain_attention)
    with pytest.raises(UnsupportedModelError):
        method.maps(ids)


def test_without_a_cap_the_same_function_agrees(plain_attention: str) -> None:
    model = gemma2(plain_attention, attn_logit_softcapping=None)
    assert NormAttribution(model).maps(families.inputs("gemma2")).decoder is not None


@pytest.mark.parametrize("window", [3, 8])
def test_windows_are_the_same_in_all_implementations(plain_attention: str, window: int) -> None:
    """Gemma 2's layers attend to a window and to all positions by turns; each implementation makes masks of its own."""
    ids = families.inputs("gemma2")
    changes: dict[str, Any] = {"attn_logit_softcapping": None, "sliding_window": window}
    expected = NormAttribution(gemma2("eager", **changes)).maps(ids).decoder
    torch.testing.assert_close(NormAttribution(gemma2(plain_attention, **changes)).maps(ids).decoder, expected)


def test_a_mask_that_an_implementation_leaves_out_is_noticed() -> None:
    def without_window(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        *parts, _ = tensors
        every = torch.ones(1, 1, parts[1].shape[2], parts[2].shape[2], dtype=torch.bool).tril()
        output: tuple[Tensor, None] = SDPA(*parts, every, **options | {"softcap": None})
        return output

    ids = families.inputs("gemma2")
    with registered(without_window) as name:
        with pytest.raises(UnsupportedModelError, match="computes something else"):
            NormAttribution(gemma2(name, attn_logit_softcapping=None, sliding_window=3)).maps(ids)
        wide = gemma2(name, attn_logit_softcapping=None, sliding_window=64)
        assert NormAttribution(wide).maps(ids).decoder is not None


class OwnCode(nn.Module):
    """Attends by its own code, and by another one in a model that nobody watches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.noise = nn.Embedding(60, 32), nn.Dropout(0.5)
        self.value, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.capped, self.random = False, False

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.noise(self.embedding(ids))
        value = self.value(hidden).unflatten(-1, (4, 8)).transpose(1, 2)
        scores = value @ value.mT
        if self.capped and torch.overrides._get_current_function_mode() is None:
            scores = scores.tanh()
        attended: Tensor = self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        hidden = hidden + attended
        return hidden + torch.randn_like(hidden) if self.random else hidden


def test_attention_of_a_models_own_code_is_held_to_what_it_computes_alone() -> None:
    torch.manual_seed(0)
    ids, model = families.inputs("bert"), OwnCode()
    with torch.no_grad():
        model.value.weight.mul_(10)
    # In training mode, too, and with random numbers, of which the model draws the same after as before.
    assert model.training
    model.random = True
    torch.manual_seed(1)
    expected = torch.randn(1)
    for capped in (False, True):
        changed = OwnCode()
        changed.load_state_dict(model.state_dict())
        changed.random, changed.capped = True, capped
        if capped:
            with pytest.raises(UnsupportedModelError, match="OwnCode computes something else"):
                NormAttribution(changed).maps(ids)
        else:
            assert AttentionWeights(changed).maps(ids).self_attention is not None
        assert changed.training
    torch.manual_seed(1)
    assert torch.equal(torch.randn(1), expected)


class Returning(nn.Module):
    """A model of which something else is returned."""

    def __init__(self, model: Any, returned: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.model, self.returned = model, returned

    def forward(self, input_ids: Tensor) -> Any:
        return self.returned(self.model, input_ids, self.model(input_ids).logits)


@pytest.mark.parametrize(
    "returned",
    [
        lambda _model, _ids, logits: logits[:, -1, 5],
        lambda _model, _ids, logits: logits.sum(),
        lambda model, ids, logits: (model.get_input_embeddings()(ids), logits),
    ],
    ids=["one logit", "a sum", "embeddings first"],
)
def test_everything_that_is_returned_is_compared(plain_attention: str, returned: Any) -> None:
    ids, model = families.inputs("gemma2"), gemma2("eager")
    wrapped = Returning(model, returned)
    assert NormAttribution(wrapped).maps(ids).decoder is not None
    # Also where it is the wrapped model that changes.
    model.set_attn_implementation(plain_attention)
    for method in (NormAttribution(wrapped), NormAttribution(Returning(model, returned))):
        with pytest.raises(UnsupportedModelError, match="Returning computes something else"):
            method.maps(ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_other_function(plain_attention: str, dtype: torch.dtype) -> None:
    """Though nothing but rounding is left of what a head gives."""
    ids = families.inputs("gemma2")

    def centred(model: Any) -> Any:
        with torch.no_grad():
            logit = model(ids).logits[:1, -1, 5]
        return Returning(model, lambda _model, _ids, logits: logits[:, -1, 5] - logit)

    same = gemma2(plain_attention, dtype, attn_logit_softcapping=None)
    assert NormAttribution(centred(same)).maps(ids).decoder is not None
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        NormAttribution(centred(gemma2(plain_attention, dtype))).maps(ids)


def test_half_precision_where_no_module_can_be_compared() -> None:
    """The module that attends reads ids, so what is seen of it is what the model returns."""
    torch.manual_seed(0)
    model = OwnCode().eval()
    with torch.no_grad():
        model.value.weight.mul_(10)
    model.capped = True
    with pytest.raises(UnsupportedModelError, match="OwnCode computes something else"):
        NormAttribution(model.bfloat16()).maps(families.inputs("bert"))
