"""The positions that heads are said to read are those that their logits depend on."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.models.auto import modeling_auto

from captum_norm import AttentionWeights
from captum_norm.models.hooks import first_tensor
from captum_norm.models.inputs import bind_inputs
from captum_norm.models.layers import layer_of
from captum_norm.models.outputs import pooled_rows, read_position
from captum_norm.models.search.attention_blocks import find_blocks
from tests import families
from tests.classifiers import randomized

CLASSES = (
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)
# Whose classifier is an encoder–decoder's, and whose layers return lists.
LEFT_OUT = ("t5-encoder", "openai-gpt")
TOWERS = {"clip-vision": (hf.CLIPConfig, "CLIP"), "siglip-vision": (hf.SiglipConfig, "Siglip")}


def classifiers() -> Iterator[tuple[str, str]]:
    """Each family that has one, and its class."""
    for name, family in families.FAMILIES.items():
        config: Any = getattr(family.build(), "config")  # noqa: B009 - no attribute of nn.Module
        found = [names for mapping in CLASSES if (names := mapping.get(config.model_type))]
        if found and name not in LEFT_OUT:
            yield name, found[0] if isinstance(found[0], str) else found[0][0]
    yield from ((name, f"{prefix}ForImageClassification") for name, (_, prefix) in TOWERS.items())


def build(name: str, class_name: str) -> Any:
    config: Any = getattr(families.FAMILIES[name].build(), "config")  # noqa: B009 - no attribute of nn.Module
    if name in TOWERS:
        config = TOWERS[name][0](vision_config=config.to_dict())
    config.num_labels = 3
    return randomized(getattr(hf, class_name)(config), 0, torch.float32)


def positions_read(model: Any, inputs: Tensor) -> Tensor:
    """Where the first logit has a gradient with respect to the last layer's output, (S,)."""
    call, seen = bind_inputs(model, inputs), list[Tensor]()

    def cut(_module: Any, _args: Any, output: Any) -> Any:
        stream: Any = first_tensor(output)
        seen.append(stream.detach().requires_grad_())
        return seen[0] if isinstance(output, Tensor) else (seen[0], *output[1:])

    *_, last = dict.fromkeys(layer_of(model, find_blocks(call)).values())
    with torch.enable_grad():
        handle = last.register_forward_hook(cut)
        logits = call.run().logits
        handle.remove()
        (gradient,) = torch.autograd.grad(logits[0, 0], seen[0])
    return gradient[0].abs().sum(-1) > 0


@pytest.mark.parametrize(("name", "class_name"), list(classifiers()))
def test_heads_read_what_is_explained_by_default(name: str, class_name: str) -> None:
    model, inputs = build(name, class_name), families.inputs(name, batch=1)
    read = positions_read(model, inputs)
    maps = AttentionWeights(model).maps(inputs)
    position: Any = read_position(model, causal=maps.decoder is not None)
    rows = pooled_rows(position, maps.real, model)
    if rows is None:
        assert read.nonzero().flatten().tolist() == [0 if position == "first" else len(read) - 1]
        return
    assert torch.equal(rows[0] > 0, read)
    torch.testing.assert_close(rows.sum(1), torch.ones(1))
    scores = AttentionWeights(model).attribute(inputs, layer=-1)
    torch.testing.assert_close(scores, (rows[:, None] @ maps.self_attention[:, -1])[:, 0])


@pytest.mark.parametrize("pooling", [True, False])
def test_heads_can_be_told_to_read_the_first_token(pooling: bool) -> None:
    model = build("beit", "BeitForImageClassification")
    config = model.config
    config.use_mean_pooling = pooling
    model = randomized(type(model)(config), 0, torch.float32)
    assert read_position(model, causal=False) == ("patches" if pooling else "first")
    assert bool(positions_read(model, families.inputs("beit", batch=1))[0]) == (not pooling)
