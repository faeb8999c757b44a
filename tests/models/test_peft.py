"""Models inside a PeftModel: adapters, switched on and off, tuned heads and embeddings, task classes."""

from copy import deepcopy
from typing import Any, cast

import pytest
import torch
import transformers as hf
from torch import Tensor

from captum_norm import AttentionTimesGradient, DecompX, InvalidInputError, NormAttribution
from captum_norm.models.wrappers import explained_module, unwrapped
from tests.models import wrapped as small
from tests.tiny import marian_config

pytestmark = small.WARNINGS


@pytest.mark.few
@pytest.mark.parametrize("name", small.BUILD)
@pytest.mark.parametrize("parts", ["attention", "head", "embeddings"])
def test_adapters_give_what_merged_weights_give(name: str, parts: str) -> None:
    targets = small.EMBEDDINGS[name] if parts == "embeddings" else small.LORA[name]
    wrapped = small.adapted(
        small.BUILD[name](), small.TASK[name], targets, modules_to_save=small.HEAD[name] if parts == "head" else None
    )
    merged = deepcopy(wrapped).merge_and_unload()
    with torch.no_grad():
        assert not torch.allclose(merged(**small.INPUTS).logits, small.BUILD[name]()(**small.INPUTS).logits, atol=0.01)
    state = small.state_of(wrapped)
    for method in small.NAMES:
        found, expected = small.scores_of(method, wrapped), small.scores_of(method, merged)
        if isinstance(found, str):
            assert found == expected, method
        else:
            # Adapters run in another order of additions; signed gradients cancel.
            torch.testing.assert_close(found, cast(Tensor, expected), rtol=1e-4, atol=1e-5)
    assert small.state_of(wrapped) == state


TASKS: dict[str, tuple[str, type, type, list[str]]] = {
    "tagger": ("TOKEN_CLS", hf.BertForTokenClassification, hf.BertConfig, small.LORA["bert"]),
    "answers": ("QUESTION_ANS", hf.BertForQuestionAnswering, hf.BertConfig, small.LORA["bert"]),
    "features": ("FEATURE_EXTRACTION", hf.BertModel, hf.BertConfig, small.LORA["bert"]),
    "causal classifier": ("SEQ_CLS", hf.LlamaForSequenceClassification, hf.LlamaConfig, small.LORA["llama"]),
}


@pytest.mark.parametrize("task", TASKS)
def test_task_classes_of_peft_change_no_position(task: str) -> None:
    kind, model_class, config_class, targets = TASKS[task]
    wrapped = small.adapted(small.randomized(lambda: model_class(config_class(**small.SIZES))), kind, targets)
    position: Any = {"features": "mean", "tagger": "mean", "answers": "mean", "causal classifier": "last"}[task]
    scores = NormAttribution(wrapped).attribute(small.INPUTS)
    assert torch.equal(scores, NormAttribution(wrapped.get_base_model()).attribute(small.INPUTS, position=position))
    if task == "tagger":
        with pytest.raises(InvalidInputError, match="pass the position to read"):
            AttentionTimesGradient(wrapped).attribute(small.INPUTS, 1)


def test_an_adapted_encoder_decoder() -> None:
    model = small.randomized(lambda: hf.MarianMTModel(marian_config(24, width=16)))
    wrapped = small.adapted(model, "SEQ_2_SEQ_LM", small.LORA["llama"])
    pair = small.INPUTS | {
        "decoder_input_ids": small.IDS.flip(1),
        "decoder_attention_mask": small.INPUTS["attention_mask"].flip(1),
    }
    found, expected = (NormAttribution(m).maps(pair) for m in (wrapped, wrapped.get_base_model()))
    for stack in ("encoder", "decoder", "cross"):
        assert torch.equal(getattr(found, stack), getattr(expected, stack))


def test_adapters_that_choose_by_the_inputs_run_through_peft() -> None:
    """An activated LoRA begins at its invocation tokens, which PeftModel finds in the inputs."""
    wrapped = small.adapted(small.llama(), "CAUSAL_LM", small.LORA["llama"], alora_invocation_tokens=[9, 3])
    assert explained_module(wrapped) is wrapped
    ids = small.IDS[:1]
    with torch.no_grad():
        logits, without = (m(input_ids=ids).logits[0, -1] for m in (wrapped, unwrapped(wrapped)))
    assert not torch.allclose(logits, without, atol=1e-3)
    torch.testing.assert_close(DecompX(wrapped).decompose(ids, 1).number, logits[1:2])
