"""Which number of a model's output is explained, and that heads read the positions that are said to be read."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from captum_norm import AttentionWeights, InvalidInputError, UnsupportedModelError
from captum_norm.models import outputs
from captum_norm.models.hooks import first_tensor
from captum_norm.models.inputs import bind_inputs
from captum_norm.models.layers import layer_of
from captum_norm.models.search.attention_blocks import find_blocks
from tests import families
from tests.classifiers import randomized, sentences

MODEL = nn.Identity()
REAL = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0]]).bool()


def test_logits_are_read_at_the_last_real_position_or_where_it_is_said() -> None:
    logits = torch.arange(24.0).reshape(3, 4, 2)
    output = OrderedDict(logits=logits)
    last = outputs.read_output(MODEL, output, REAL, None, None)
    assert torch.equal(last, torch.stack([logits[0, 3], logits[1, 1], logits[2, 2]]))
    read = torch.zeros_like(REAL)
    read[0, 1] = read[1, 0] = read[2, 2] = True
    there = outputs.read_output(MODEL, output, REAL, read, None)
    assert torch.equal(there, torch.stack([logits[0, 1], logits[1, 0], logits[2, 2]]))
    assert torch.equal(outputs.read_output(MODEL, logits[:, 0], REAL, None, None), logits[:, 0])


def test_a_readout_sees_output_and_real_positions() -> None:
    output = {"hidden": torch.rand(3, 4, 2)}
    scores = outputs.read_output(MODEL, output, REAL, None, lambda out, real: (out["hidden"] * real[..., None]).sum(1))
    assert torch.equal(scores, (output["hidden"] * REAL[..., None]).sum(1))


def test_positions_are_those_of_the_users_inputs() -> None:
    model, (ids, mask) = families.build("gpt2"), sentences([6, 4, 5])
    call = bind_inputs(model, ids, mask)
    assert outputs.read_mask(call, None) is None
    shown = [3, 4, -3]  # the second example is padded on the left
    read: Any = outputs.read_mask(call, shown)
    assert read.nonzero().tolist() == [[0, 3], [1, 2], [2, 3]]
    assert outputs.real_positions(call).sum(1).tolist() == [6, 4, 5]


@pytest.mark.parametrize(
    ("target", "chosen"), [(1, [1, 1]), ([0, 2], [0, 2]), (torch.tensor([2]), [2, 2]), (None, [2, 0])]
)
def test_targets(target: Any, chosen: list[int]) -> None:
    scores = torch.tensor([[0.1, 0.2, 0.3], [3.0, 2.0, 1.0]])
    found: Any = outputs.chosen_target(target, scores)
    assert found.tolist() == chosen


@pytest.mark.parametrize("target", [3, -1, [0, 3], outputs.Difference(0, 3)])
def test_classes_that_there_are_not(target: Any) -> None:
    with pytest.raises(InvalidInputError, match="expected 0 to 2"):
        outputs.chosen_target(target, torch.zeros(2, 3))


@pytest.mark.parametrize("target", [0.5, True, [0, 1, 2], [[0], [1]], "positive"])
def test_targets_that_are_none(target: Any) -> None:
    with pytest.raises(InvalidInputError, match="for 2 examples; expected an integer, or one for each example"):
        outputs.chosen_target(target, torch.zeros(2, 3))


def test_one_number_has_no_classes() -> None:
    assert outputs.chosen_target(None, torch.zeros(2)) is None
    with pytest.raises(InvalidInputError, match="target=0, but the output is one number for each example"):
        outputs.chosen_target(0, torch.zeros(2))


def test_outputs_that_say_nothing_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Identity returns no logits"):
        outputs.read_output(MODEL, {"last_hidden_state": torch.zeros(3, 4, 2)}, REAL, None, None)
    tagger = hf.BertForTokenClassification(hf.BertConfig(**families.TEXT))
    with pytest.raises(InvalidInputError, match="BertForTokenClassification has logits for every position"):
        outputs.read_output(tagger, {"logits": torch.zeros(3, 4, 2)}, REAL, None, None)
    with pytest.raises(InvalidInputError, match=r"readout returned \(4, 3\) for 3 examples"):
        outputs.read_output(MODEL, torch.zeros(3, 4), REAL, None, lambda out, _: out.T)
    with pytest.raises(InvalidInputError, match="readout returned float for 3 examples"):
        outputs.read_output(MODEL, torch.zeros(3, 4), REAL, None, lambda *_: 0.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"Identity returns \(4, 3, 2\) for 3 examples of 4 positions"):
        outputs.read_output(MODEL, torch.zeros(4, 3, 2), REAL, None, None)


def test_ends_are_named() -> None:
    model, (ids, mask) = families.build("gpt2"), sentences([6, 4, 5])
    call = bind_inputs(model, ids, mask)
    for name, place in (("first", 0), ("last", -1)):
        read: Any = outputs.read_mask(call, name)  # type: ignore[arg-type]
        expected = [row.nonzero()[place].item() for row in outputs.real_positions(call)]
        assert [row.nonzero().item() for row in read] == expected
    with pytest.raises(InvalidInputError, match='got position="mean"; an output is read at one position'):
        outputs.read_mask(call, "mean")


def test_a_difference_is_of_two_classes() -> None:
    scores = torch.tensor([[0.1, 0.2, 0.3], [3.0, 2.0, 1.0]])
    chosen: Any = outputs.chosen_target(outputs.Difference([0, 1], 2), scores)
    assert chosen.tolist() == [[0, 2], [1, 2]]
    torch.testing.assert_close(outputs.explained_number(scores, chosen), torch.tensor([-0.2, 1.0]))
    torch.testing.assert_close(outputs.explained_number(scores, chosen[:1]), torch.tensor([-0.2, 2.0]))


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
        try:
            config: Any = getattr(family.build(), "config")  # noqa: B009 - no attribute of nn.Module
        except pytest.skip.Exception:  # of a later transformers
            continue
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
    position: Any = outputs.read_position(model, causal=maps.decoder is not None)
    rows = outputs.pooled_rows(position, maps.real, model)
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
    assert outputs.read_position(model, causal=False) == ("patches" if pooling else "first")
    assert bool(positions_read(model, families.inputs("beit", batch=1))[0]) == (not pooling)
