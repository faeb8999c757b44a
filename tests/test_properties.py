"""What every method promises for any call: a CaptumNormError in one sentence, or what each example alone gives.

``CAPTUM_NORM_FUZZ=40`` in the environment, as ``make fuzz`` sets it, draws 40 times as many calls.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from captum import attr
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

import captum_norm
from captum_norm import AttentionMapAttribution, AttributionMaps, CaptumNormError, Difference
from captum_norm.attr.layer_maps import TOLERANCE
from captum_norm.lab.comparison import RandomScores
from captum_norm.methods import METHODS
from captum_norm.results.maps import Scores, SourceAndPrefix
from tests.classifiers import randomized
from tests.families import TEXT, state_of
from tests.fuzzing import FACTOR
from tests.tiny import marian_config
from tests.torch_models import Pooled

VOCABULARY, WIDTH, LAYERS, LONGEST = 40, 16, 2, 7
SIZES = TEXT | {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 24}


MODELS: dict[str, Callable[[], Any]] = {
    "post-norm": lambda: hf.BertForSequenceClassification(hf.BertConfig(**SIZES | {"num_labels": 3})),
    "pre-norm, causal": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**SIZES)),
    "gated, grouped queries": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "encoder–decoder": lambda: hf.MarianMTModel(marian_config(VOCABULARY, LAYERS, WIDTH)),
    "torch.nn": lambda: Pooled(batch_first=True),
}
# Which weights, in which dtype, times which number.
VARIANTS = [
    *((name, torch.float32, 1.0) for name in (*MODELS, *MODELS, *MODELS)),
    *((name, torch.float64, 1.0) for name in MODELS if name != "encoder–decoder"),
    *(("pre-norm, causal", dtype, 1e2) for dtype in (torch.float32, torch.float64)),
    *((name, torch.float32, 1e-2) for name in ("post-norm", "gated, grouped queries")),
]
# Of methods that have some.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "norm": [
        {"scope": "attn", "aggregation": "mean"},
        *({"scope": scope, "aggregation": "rollout"} for scope in ("attn", "attn_res", "attn_res_ln")),
    ],
    "attention-block": [{"scope": scope} for scope in ("atb", "atb_ln", "atb_ff", "atb_ff_res", "atb_ff_res_ln")],
    "weights": [{"scope": scope} for scope in ("attn", "attn_res")],
    "decompx": [{}, {"bias": "absdot"}, {"propagate": True}],
}
FASTER = {"n_steps": 4, "n_samples": 3}
RANDOM = ("gradient-shap", "shapley", "lime", "random")
CASES = [(name, options) for name in METHODS for options in OPTIONS.get(name, [{}])]
# How many calls: 400 in all in the long tier, some of them in the short one, fewer of those that take longest.
SLOW = {"decompx": 15, "cp-lrp": 15, "attnlrp": 20, "gim": 20, "lime": 15}
CALLS = math.ceil((400 - sum(SLOW.get(name, 0) for name, _ in CASES)) / sum(name not in SLOW for name, _ in CASES))


def named(name: str, options: dict[str, Any]) -> str:
    return "-".join([name, *map(str, options.values())])


@cache
def built(name: str, dtype: torch.dtype, scale: float) -> Any:
    """A model whose matrices are multiplied by ``scale``."""
    torch.manual_seed(0)
    model = randomized(MODELS[name](), 1, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model


@cache
def method_of(name: str, options: tuple[tuple[str, Any], ...], model: Any) -> Any:
    method = METHODS[name]
    if name == "random":
        return RandomScores(model)
    if method.package == "captum_norm":
        return getattr(captum_norm, method.class_name)(model, **dict(options))
    chosen = {option: min(value, FASTER.get(option, value)) for option, value in (method.options or {}).items()}
    return captum_norm.TokenAttribution(model, getattr(attr, method.class_name), **chosen)


@dataclass(frozen=True)
class Call:
    """Examples of these lengths that begin at ``start``, as token ids or, with ``embedded``, as embeddings."""

    model: str
    dtype: torch.dtype
    scale: float
    lengths: tuple[int, ...]
    start: tuple[int, ...]
    width: int
    embedded: str | None
    options: dict[str, Any]

    @property
    def precision(self) -> torch.dtype:
        """What the model rounds to: Llama's norms are taken in single precision."""
        return torch.float32 if self.model.startswith("gated") else self.dtype

    @property
    def mask(self) -> Tensor:
        places = torch.arange(self.width)
        return torch.stack([(places >= s) & (places < s + n) for s, n in zip(self.start, self.lengths, strict=True)])

    def inputs(self, model: Any) -> Any:
        """The batch."""
        generator = torch.Generator().manual_seed(sum(self.lengths))
        ids = torch.randint(3, VOCABULARY, self.mask.shape, generator=generator).where(self.mask, 0)
        mask = self.mask.long()
        if self.model == "torch.nn":
            return {"ids": ids, "padding_mask": ~self.mask}
        if self.model == "encoder–decoder":
            source = {"input_ids": ids, "attention_mask": mask}
            return source | {f"decoder_{name}": tensor for name, tensor in source.items()}
        if self.embedded is None:
            return {"input_ids": ids, "attention_mask": mask}
        with torch.no_grad():
            embeddings = model.get_input_embeddings()(ids)
        return {"inputs_embeds": LAYOUTS[self.embedded](embeddings), "attention_mask": mask}

    def alone(self, inputs: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
        """One example without its padding."""
        places = slice(self.start[row], self.start[row] + self.lengths[row])
        return {name: tensor[row : row + 1, places].contiguous() for name, tensor in inputs.items()}


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda e: e,
    "features first": lambda e: e.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "every other": lambda e: e.repeat_interleave(2, -1)[..., ::2],
    "requires gradient": lambda e: e.clone().requires_grad_(),
}

SENSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "target": st.sampled_from([0, 2, torch.tensor(1), Difference(0, 1)]),
    "position": st.sampled_from(["first", "last", "mean"]),
    "layer": st.sampled_from([0, 1, -1, -2]),
}


@st.composite
def calls(draw: st.DrawFn) -> Call:
    lengths = tuple(draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=3)))
    width = max(lengths) + draw(st.sampled_from([0, 0, 0, 1, 2]))
    name, dtype, scale = draw(st.sampled_from(VARIANTS))
    # torch.nn's models are called as they are: what is padded on the left stands elsewhere alone.
    left = draw(st.booleans()) and name != "torch.nn"
    start = tuple(width - length if left else 0 for length in lengths)
    embedded = draw(st.sampled_from([None, None, *LAYOUTS]))
    options = {option: draw(values) for option, values in SENSIBLE.items() if draw(st.booleans())}
    return Call(name, dtype, scale, lengths, start, width, embedded, options)


def output_of(model: Any) -> Tensor:
    ids = torch.tensor([[3, 4, 5, 6]])
    arguments = {"decoder_input_ids": ids} if isinstance(model, hf.MarianMTModel) else {}
    with torch.no_grad():
        output = model(ids, **arguments)
    return output if isinstance(output, Tensor) else output.logits


def explained(work: Callable[[], Any]) -> Any:
    """What a method gives, or None where it refuses in one sentence."""
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002 - the generator that Captum draws from
    try:
        return work()
    except CaptumNormError as error:
        refusal = str(error)
    assert refusal
    assert "\n" not in refusal
    return None


def near(actual: Tensor, expected: Tensor, precision: torch.dtype, rounded: float = 0.0) -> bool:
    """Up to rounding, relative to the largest number or what the numbers are differences of, if that is more."""
    tolerance = 2e-4 if precision == torch.float32 else 1e-8
    accepted = max(tolerance * float(expected.abs().max()), 8 * torch.finfo(precision).eps * rounded)
    return bool((actual - expected).abs().max() <= accepted)


def source_of(scores: Any) -> Tensor:
    """The scores of the source if there is a target prefix as well."""
    found: Tensor = scores.source if isinstance(scores, SourceAndPrefix) else scores
    return found


def check_scores(call: Call, method: Any, inputs: Any, found: Scores, rounded: float, *, random: bool) -> None:
    mask, scores = call.mask, source_of(found)
    if isinstance(found, SourceAndPrefix):
        assert len(found.prefix) == len(mask)
        assert found.prefix.isfinite().all()
    assert scores.shape == mask.shape
    assert scores.dtype in (torch.float32, torch.float64)
    assert scores.isfinite().all()
    assert (scores[~mask] == 0).all()
    again = source_of(explained(lambda: method.attribute(inputs, **call.options)))
    assert torch.equal(again, scores)
    if random:
        return
    if isinstance(method, captum_norm.TokenAttribution) and call.scale > 1 and call.precision == torch.float32:
        # Gradients through weights as large cancel: single precision is up to 2e-3 off in a batch, where double
        # precision, which is compared, gives the same to 1e-12.
        return
    for row in range(len(mask)):
        alone = source_of(explained(partial(method.attribute, call.alone(inputs, row), **call.options)))
        assert near(scores[row, mask[row]].detach(), alone[0].detach(), call.precision, rounded)


def check_maps(call: Call, maps: AttributionMaps) -> None:
    mask = call.mask
    assert torch.equal(maps.real, mask)
    for stack in (maps.encoder, maps.decoder, maps.cross):
        if stack is not None:
            assert stack.shape[0] == len(mask)
            assert stack.shape[-2:] == (call.width, call.width)
            assert stack.isfinite().all()
            assert not stack.masked_fill(mask[:, None, :, None] & mask[:, None, None, :], 0).any()
    if maps.convergence_delta is not None:
        assert (maps.convergence_delta <= TOLERANCE[call.precision]).all()


@pytest.mark.fuzz
@pytest.mark.filterwarnings(
    "ignore:Setting forward, backward hooks", "ignore:Objective did not converge", "ignore:The PyTorch API of nested"
)
@pytest.mark.parametrize(
    ("name", "options", "share"),
    [
        *(pytest.param(*case, 0.15, id=f"some {named(*case)}") for case in CASES[::5]),
        *(pytest.param(*case, 1, id=named(*case), marks=pytest.mark.long) for case in CASES),
    ],
)
def test_a_call_is_refused_or_its_numbers_are_right(name: str, options: dict[str, Any], share: float) -> None:
    if (requires := METHODS[name].requires) is not None:
        pytest.importorskip(str(requires), reason=f"{name} needs {requires}")

    @settings(
        max_examples=math.ceil(SLOW.get(name, CALLS) * FACTOR * share),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(calls())
    def check(call: Call) -> None:
        model = built(call.model, call.dtype, call.scale)
        before, output = state_of(model), output_of(model)
        method = explained(lambda: method_of(name, tuple(options.items()), model))
        if method is None:
            event("no method for the model")
            return
        inputs, maps = call.inputs(model), None
        taken = signature(method.attribute).parameters
        call = replace(call, options={name: value for name, value in call.options.items() if name in taken})
        scores = explained(lambda: method.attribute(inputs, **call.options))
        if scores is not None:
            # Parts of an output are differences of outputs.
            rounded = 0.0 if isinstance(method, AttentionMapAttribution) else float(output.abs().max())
            check_scores(call, method, inputs, scores, rounded, random=name in RANDOM)
        if isinstance(method, AttentionMapAttribution):
            layers = [call.options["layer"]] if "layer" in call.options else None
            maps = explained(lambda: method.maps(inputs, layers=layers))
            if maps is not None:
                check_maps(call, maps)
        event("refused" if scores is None and maps is None else "explained")
        assert state_of(model) == before
        assert torch.equal(output_of(model), output)

    check()
