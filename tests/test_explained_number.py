"""The number that is explained is that of the plain call, with the user's own keyword arguments."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from captum_norm import CPLRP, GIM, ALTILogit, AttnLRP, DecompX
from tests import encoder_decoders, families
from tests.attr.frozen.test_decompx import REFUSED
from tests.attr.test_alti_logit import head_of_means
from tests.families import FAMILIES, TEXT, TEXTS, tiers
from tests.families.family import new

METHODS: dict[str, Callable[..., Any]] = {
    "decompx": DecompX,
    "decompx, propagated": lambda model, **options: DecompX(model, propagate=True, **options),
    "attnlrp": AttnLRP,
    "alti-logit": ALTILogit,
}
"""One method of each way of a forward pass."""
ALIKE: dict[str, Callable[..., Any]] = {"cp-lrp": CPLRP, "gim": GIM}
"""Those that run as DecompX and as AttnLRP."""
MASK = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
OWN: dict[str, Any] = {
    "attention_mask": MASK,
    "token_type_ids": torch.tensor([[0] * 3 + [1] * 4, [0] * 4 + [1] * 3]),
    "position_ids": torch.tensor([[3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 4, 5, 6, 7]]),
    "use_cache": True,
    "output_hidden_states": True,
}
"""Arguments of one's own, of which a model gets those that its forward function names."""


def expect_number(model: Any, inputs: dict[str, Any], **options: Any) -> None:
    """Expect of every method the number of the plain call, which the readout or else ``options`` name."""
    readout, target = options.pop("readout", None), options["target"]
    with torch.no_grad():
        output = model(**inputs)
    if readout is not None:
        plain = readout(output, MASK.bool())[:, target]
    else:
        logits = output.logits
        plain = logits[:, target] if logits.dim() == 2 else logits[torch.arange(len(logits)), -1, target]
    for name, make in (METHODS | (ALIKE if readout is None else {})).items():
        made = make(model, readout=readout)
        found = made.decompose(inputs, **options)
        # With gradients torch does not fold some products, and propagation has larger batches.
        near = torch.allclose(found.number, plain, rtol=1e-5, atol=1e-6)
        assert near, (name, found.number, plain)


@pytest.mark.few(cases=8)
@pytest.mark.parametrize("name", tiers(name for name in FAMILIES if name not in {*REFUSED, "xmod"}))
def test_the_number_of_every_family_is_that_of_the_plain_call(name: str) -> None:
    model = families.build(name)
    known = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {next(iter(known)): families.inputs(name, 0, 2, 7)}
    given = OWN if name in TEXTS else {"output_hidden_states": True}
    inputs |= {key: value for key, value in given.items() if key in known}
    if getattr(model.config, "type_vocab_size", 1) < 2:
        inputs.pop("token_type_ids", None)
    expect_number(model, inputs, readout=head_of_means, target=1)


def test_logits_of_language_and_translation_models_are_those_of_the_plain_call() -> None:
    model, ids = new("LlamaForCausalLM", **TEXT)().eval(), families.inputs("llama", 0, 2, 7)
    places = OWN["position_ids"]
    for keep in (1, 0):
        options = {"use_cache": keep == 1, "output_hidden_states": True, "return_dict": True}
        inputs = {"input_ids": ids, "position_ids": places, "logits_to_keep": keep, **options}
        expect_number(model, inputs, target=11)
    model, inputs = encoder_decoders.build("bart"), encoder_decoders.inputs("bart", 0, 2, 5, 4)
    for cached in (False, True):
        expect_number(model, inputs | {"use_cache": cached, "output_hidden_states": True}, target=7)
