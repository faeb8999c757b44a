"""Calls of ALTI-Logit: batches, several values, precision, caches, and what is refused."""

from typing import Any

import pytest
import torch

from captum_norm import ALTILogit, InvalidInputError, UnsupportedScopeError
from captum_norm.attr.logit_updates import stacked_heads
from tests import families
from tests.attr.test_alti_logit import head_of_means
from tests.classifiers import classifier, sentences


def test_several_values_of_a_padded_batch() -> None:
    ids, mask = sentences([9, 6, 7, 4])
    method, target = ALTILogit(families.build("gpt2", dtype=torch.float64)), torch.tensor([0, 2, 1, 2])
    together = method.decompose({"input_ids": ids, "attention_mask": mask}, target)
    last = [[int(row.nonzero().max()), int(row.nonzero().min()) + 1] for row in mask]
    several = method.decompose(ids, [[t, 7] for t in target.tolist()], mask, position=last)
    torch.testing.assert_close(several.scores[:, 0], together.scores)
    torch.testing.assert_close(several.bias[:, 0], together.bias)
    torch.testing.assert_close(several.number[:, 0], together.number)


def test_repeated_positions_have_a_target_each_and_none_is_the_prediction() -> None:
    model, ids = families.build("llama", dtype=torch.float64), families.inputs("llama", batch=1)
    method = ALTILogit(model)
    found = method.decompose(ids, [[7, 9, 9, 4]], position=[[3, 3, 2, 3]])
    for p, (token, position) in enumerate([(7, 3), (9, 3), (9, 2), (4, 3)]):
        alone = method.decompose(ids, token, position=position)
        for several, one in zip(found, alone, strict=True):
            torch.testing.assert_close(several[:, p], one, rtol=1e-7, atol=1e-9)
    with torch.no_grad():
        predicted = model(ids).logits[0, [1, 4]]
    each = method.decompose(ids, [[7, 9]], position=3)
    torch.testing.assert_close(each.scores, found.scores[:, :2])
    torch.testing.assert_close(each.bias, found.bias[:, :2])
    whole = method.decompose(ids, [[7, 9]], position=3, together=True)
    torch.testing.assert_close(whole.scores, each.scores.sum(1))
    best = method.decompose(ids, position=torch.tensor([[1, 4]]))
    torch.testing.assert_close(best.number[0], predicted.amax(1))


def test_attentions_updates_alone_leave_the_rest_to_the_bias() -> None:
    model, ids = families.build("gpt2", dtype=torch.float64), families.inputs("gpt2")
    whole, updates = ALTILogit(model).decompose(ids, 5), ALTILogit(model).logit_updates(ids, 5)
    attention = ALTILogit(model, "attention").decompose(ids, 5)
    torch.testing.assert_close(attention.scores.sum(1), updates.heads.sum((1, 2)))
    torch.testing.assert_close(attention.bias, whole.bias + updates.embedding + updates.feed_forward.sum(1))
    assert (attention.scores - whole.scores).abs().max() > 1e-3


def test_half_precision() -> None:
    ids = families.inputs("llama")
    expected = ALTILogit(families.build("llama")).decompose(ids, 5)
    half = families.build("llama", dtype=torch.bfloat16)
    rounded = ALTILogit(half).decompose(ids, 5)
    assert rounded.scores.dtype == torch.float32
    assert rounded.convergence_delta.max() < 4e-2
    assert (rounded.scores - expected.scores).norm() < 0.2 * expected.scores.norm()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position": [[1, 2], [3, 4]]}, r"got position=\[\[1, 2\], \[3, 4\]\] for 3 examples"),
        ({"position": [[1, 2], [3], [4, 5]]}, "expected as many positions for each example"),
        ({"position": [[1], [2], [9]]}, "got position 9; the sequence has"),
        ({"position": [[1, 2]] * 3, "target": [[1, 2]] * 2}, r"got target=\[\[1, 2\], \[1, 2\]\] for 2 values of each"),
        ({"target": 99}, "got the target 99; expected 0 to"),
        ({"position": "mean"}, 'got position="mean"; an output is read at one position'),
    ],
)
def test_wrong_positions_and_targets_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        ALTILogit(families.build("gpt2")).decompose(families.inputs("gpt2", length=7), **arguments)


def test_what_cannot_be_explained_is_refused() -> None:
    ids, several = families.inputs("bert"), [[1, 2]] * 3
    with pytest.raises(InvalidInputError, match="attribute and maps explain one: pass them to decompose"):
        ALTILogit(families.build("gpt2")).attribute(ids, 1, position=several)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="returns outputs of shape"):
        ALTILogit(classifier()).decompose(ids, 1, position=several)
    with pytest.raises(UnsupportedScopeError, match="no feed-forward network was understood"):
        ALTILogit(families.build("xmod"), readout=head_of_means).attribute(families.inputs("xmod"), 1)
    with pytest.raises(InvalidInputError, match="got spread='mlp'; expected one of all, attention"):
        ALTILogit(families.build("gpt2"), "mlp")  # type: ignore[arg-type]


def test_behind_a_cache_there_are_updates_and_no_scores() -> None:
    model, ids = families.build("gpt2", dtype=torch.float64), families.inputs("gpt2")
    method = ALTILogit(model)
    with torch.no_grad():
        cache = model(ids[:, :4], use_cache=True).past_key_values
    inputs = {"input_ids": ids[:, 4:], "past_key_values": cache}
    for found, expected in zip(method.logit_updates(inputs, 5), method.logit_updates(ids, 5), strict=True):
        if found is None or expected is None:
            assert found is expected
        else:
            assert (found - expected).abs().max() < 1e-10
    with pytest.raises(InvalidInputError, match="cache"):
        method.decompose(inputs, 5)


def test_layers_may_have_different_numbers_of_heads() -> None:
    stacked = stacked_heads([torch.ones(2, 3), torch.full((2, 1), 2.0)])
    assert stacked.tolist() == [[[1, 1, 1], [2, 0, 0]]] * 2
