"""Which number of a model's output is explained."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from captum_norm import InvalidInputError, UnsupportedModelError
from captum_norm.models import outputs
from captum_norm.models.inputs import bind_inputs
from tests import families
from tests.classifiers import sentences

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
