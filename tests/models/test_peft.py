"""Models inside a PeftModel: adapters, switched on and off, tuned heads and embeddings, task classes."""

from copy import deepcopy
from typing import Any, cast

import pytest
import torch
import transformers as hf
from torch import Tensor

from captum_norm import AttentionTimesGradient, DecompX, InvalidInputError, NormAttribution
from captum_norm.models.wrappers import explained_module, unwrapped
from tests.models.wrapped import (
    BUILD,
    EMBEDDINGS,
    HEAD,
    IDS,
    INPUTS,
    LORA,
    NAMES,
    SIZES,
    TASK,
    WARNINGS,
    adapted,
    llama,
    randomized,
    scores_of,
    state_of,
)
from tests.tiny import marian_config

pytestmark = WARNINGS


@pytest.mark.few
@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("parts", ["attention", "head", "embeddings"])
def test_adapters_give_what_merged_weights_give(name: str, parts: str) -> None:
    targets = EMBEDDINGS[name] if parts == "embeddings" else LORA[name]
    wrapped = adapted(BUILD[name](), TASK[name], targets, modules_to_save=HEAD[name] if parts == "head" else None)
    merged = deepcopy(wrapped).merge_and_unload()
    with torch.no_grad():
        assert not torch.allclose(merged(**INPUTS).logits, BUILD[name]()(**INPUTS).logits, atol=0.01)
    state = state_of(wrapped)
    for method in NAMES:
        found, expected = scores_of(method, wrapped), scores_of(method, merged)
        if isinstance(found, str):
            assert found == expected, method
        else:
            # Adapters run in another order of additions; signed gradients cancel.
            torch.testing.assert_close(found, cast(Tensor, expected), rtol=1e-4, atol=1e-5)
    assert state_of(wrapped) == state


TASKS: dict[str, tuple[str, type, type, list[str]]] = {
    "tagger": ("TOKEN_CLS", hf.BertForTokenClassification, hf.BertConfig, LORA["bert"]),
    "answers": ("QUESTION_ANS", hf.BertForQuestionAnswering, hf.BertConfig, LORA["bert"]),
    "features": ("FEATURE_EXTRACTION", hf.BertModel, hf.BertConfig, LORA["bert"]),
    "causal classifier": ("SEQ_CLS", hf.LlamaForSequenceClassification, hf.LlamaConfig, LORA["llama"]),
}


@pytest.mark.parametrize("task", TASKS)
def test_task_classes_of_peft_change_no_position(task: str) -> None:
    kind, model_class, config_class, targets = TASKS[task]
    wrapped = adapted(randomized(lambda: model_class(config_class(**SIZES))), kind, targets)
    position: Any = {"features": "mean", "tagger": "mean", "answers": "mean", "causal classifier": "last"}[task]
    scores = NormAttribution(wrapped).attribute(INPUTS)
    assert torch.equal(scores, NormAttribution(wrapped.get_base_model()).attribute(INPUTS, position=position))
    if task == "tagger":
        with pytest.raises(InvalidInputError, match="pass the position to read"):
            AttentionTimesGradient(wrapped).attribute(INPUTS, 1)


def test_an_adapted_encoder_decoder() -> None:
    model = randomized(lambda: hf.MarianMTModel(marian_config(24, width=16)))
    wrapped = adapted(model, "SEQ_2_SEQ_LM", LORA["llama"])
    pair = INPUTS | {"decoder_input_ids": IDS.flip(1), "decoder_attention_mask": INPUTS["attention_mask"].flip(1)}
    found, expected = (NormAttribution(m).maps(pair) for m in (wrapped, wrapped.get_base_model()))
    for stack in ("encoder", "decoder", "cross"):
        assert torch.equal(getattr(found, stack), getattr(expected, stack))


def test_adapters_that_choose_by_the_inputs_run_through_peft() -> None:
    """An activated LoRA begins at its invocation tokens, which PeftModel finds in the inputs."""
    wrapped = adapted(llama(), "CAUSAL_LM", LORA["llama"], alora_invocation_tokens=[9, 3])
    assert explained_module(wrapped) is wrapped
    ids = IDS[:1]
    with torch.no_grad():
        logits, without = (m(input_ids=ids).logits[0, -1] for m in (wrapped, unwrapped(wrapped)))
    assert not torch.allclose(logits, without, atol=1e-3)
    torch.testing.assert_close(DecompX(wrapped).decompose(ids, 1).number, logits[1:2])
