"""Every score, derived once more one example and one perturbed input at a time; agreement against its definition."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations, pairwise, product
from math import ceil, log, nan, sqrt
from statistics import correlation, mean
from typing import Any, Literal

import pytest
import torch
import transformers as hf
from captum.attr import FeatureAblation
from torch import Tensor, nn

from captum_norm import Difference, InvalidInputError, TokenAttribution, UnsupportedModelError
from captum_norm.lab.evaluation import Faithfulness, FaithfulnessScores, Perturbation, agreement
from tests import families
from tests.classifiers import MASK, SEP, TOKENIZER, alone, classifier, randomized, sentences

Removal = Literal["mask", "mean", "zero", "delete"]
BINS = (Fraction(1, 100), Fraction(1, 5), Fraction(1, 2))
STEPS = 4


def without(model: Any, ids: Tensor, removed: set[int], removal: Removal) -> dict[str, Tensor]:
    """The inputs of one example without some of its tokens, (S,)."""
    stays = [token for token in range(len(ids)) if token not in removed]
    if removal == "delete":
        return {"input_ids": ids[stays][None]}
    if removal == "mask":
        return {
            "input_ids": torch.tensor([[MASK if token in removed else int(ids[token]) for token in range(len(ids))]])
        }
    table = model.get_input_embeddings().weight.detach()
    embedded = table[ids].clone()
    embedded[list(removed)] = table.mean(0) if removal == "mean" else 0
    return {"inputs_embeds": embedded[None]}


def shared_ranks(values: list[float]) -> list[float]:
    """Places from the lowest, the mean place for equal values."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def rho(first: list[float], second: list[float]) -> float:
    """Spearman's correlation."""
    ordered = min(len(set(first)), len(set(second))) > 1
    return correlation(shared_ranks(first), shared_ranks(second)) if ordered else nan


def tau(first: list[float], second: list[float]) -> float:
    """Kendall's τ_b."""
    pairs = combinations(zip(first, second, strict=True), 2)
    signs = [((x > y) - (x < y), (u > v) - (u < v)) for (x, u), (y, v) in pairs]
    ordered = sqrt(sum(x != 0 for x, _ in signs) * sum(u != 0 for _, u in signs))
    return sum(x * u for x, u in signs) / ordered if ordered else nan


def derived(
    output: Callable[[set[int]], float],
    scores: list[float],
    removable: list[int],
    logs: bool,
    bins: Sequence[Fraction] = BINS,
) -> dict[str, Any]:
    """All scores of one example whose output without some tokens is known."""
    order = sorted(removable, key=lambda token: (-scores[token], token))
    whole = output(set())
    tops = [set(order[: ceil(share * len(order))]) for share in bins]
    shares = [Fraction(step, STEPS) for step in range(STEPS + 1)]
    morf = [output(set(order[: ceil(share * len(order))])) for share in shares]
    lerf = [output(set(order[::-1][: ceil(share * len(order))])) for share in shares]
    omitted = [whole - output({token}) for token in removable]
    ranked = [scores[token] for token in removable]

    def area(curve: list[float]) -> float:
        return mean((left + right) / 2 for left, right in pairwise(curve))

    return {
        "aopc": mean(whole - value for value in morf[1:]),
        "comprehensiveness": mean(whole - output(top) for top in tops),
        "sufficiency": mean(whole - output(set(removable) - top) for top in tops),
        "log_odds": mean(log(output(top)) - log(whole) for top in tops) if logs else nan,
        "relevance_gain": area(lerf) - area(morf),
        "spearman": rho(ranked, omitted),
        "kendall": tau(ranked, omitted),
        "morf": morf,
        "lerf": lerf,
    }


def check(scores: FaithfulnessScores, row: int, expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        actual = getattr(scores, name)[row]
        torch.testing.assert_close(
            actual, torch.tensor(value, dtype=torch.float64), rtol=1e-9, atol=1e-11, equal_nan=True, msg=name
        )


def check_rows(
    actual: FaithfulnessScores, model: Any, ids: Tensor, mask: Tensor, scores: Tensor, perturbation: Perturbation,
    removal: Removal, targets: list[int] | None,
) -> None:  # fmt: skip
    """Compare with what each example alone gives."""
    logs = perturbation.output == "probability"
    for row in range(len(ids)):
        tokens = alone(ids, mask, row)[0]
        special = (0, len(tokens) - 1) if perturbation.keep_special else ()

        def logits(removed: set[int], tokens: Tensor = tokens) -> Tensor:
            with torch.no_grad():
                found: Tensor = model(**without(model, tokens, removed, removal)).logits[0]
            return found if found.dim() == 1 else found[-1]

        target = int(logits(set()).argmax()) if targets is None else targets[row]

        def f(removed: set[int], of: Any = logits, target: int = target) -> float:
            return float((of(removed).softmax(0) if logs else of(removed))[target])

        removable = [token for token in range(len(tokens)) if token not in special]
        check(actual, row, derived(f, alone(scores, mask, row)[0].tolist(), removable, logs))


# Deleting special tokens, too, would leave nothing.
@pytest.mark.parametrize(
    ("removal", "keep_special"),
    [*product(["mask", "mean", "zero"], [True, False]), ("delete", True)],
)
@pytest.mark.parametrize("output", ["probability", "logit"])
@pytest.mark.parametrize("seed", range(2))
def test_scores_of_a_classifier(
    removal: Removal, keep_special: bool, output: Literal["probability", "logit"], seed: int
) -> None:
    model, (ids, mask) = classifier(seed), sentences([9, 6, 4, 7], seed)
    scores = torch.randn(ids.shape, generator=torch.Generator().manual_seed(seed)).round(decimals=1)
    perturbation = Perturbation(model, removal, tokenizer=TOKENIZER, keep_special=keep_special, output=output)
    faithfulness = Faithfulness(perturbation, bins=[float(share) for share in BINS], steps=STEPS)
    targets = None if seed == 0 else [2, 0, 1, 1]
    actual = faithfulness.evaluate(ids, {"": scores}, targets, mask)[""]
    check_rows(actual, model, ids, mask, scores, perturbation, removal, targets)


@pytest.mark.parametrize("removal", ["mean", "delete"])
def test_scores_of_a_causal_language_model(removal: Removal) -> None:
    model = families.build("gpt2", dtype=torch.float64)
    ids, mask = sentences([8, 5, 7])
    scores = torch.randn(ids.shape, generator=torch.Generator().manual_seed(0))
    tokenizer = TOKENIZER if removal == "delete" else None
    perturbation = Perturbation(model, removal, tokenizer=tokenizer, keep_special=removal == "delete")
    faithfulness = Faithfulness(perturbation, bins=[float(share) for share in BINS], steps=STEPS)
    inputs, targets = {"input_ids": ids, "attention_mask": mask}, [7, 11, 30]
    actual = faithfulness.evaluate(inputs, {"": scores}, targets)[""]
    check_rows(actual, model, ids, mask, scores, perturbation, removal, targets)


def test_the_position_read_is_never_removed_and_moves_with_deletion() -> None:
    model = families.build("gpt2", dtype=torch.float64)
    ids, mask = sentences([8, 6])
    positions = [5, -3]
    bound = Perturbation(model, "delete", tokenizer=TOKENIZER).bind(ids, mask, target=[9, 8], position=positions)
    omitted = bound.leave_one_out()
    for row, (position, target) in enumerate(zip(positions, (9, 8), strict=True)):
        tokens = alone(ids, mask, row)[0]
        start = int(mask[row].argmax())
        read = position % ids.shape[1] - start

        def f(removed: set[int], tokens: Tensor = tokens, read: int = read, target: int = target) -> float:
            place = read - sum(token < read for token in removed)
            with torch.no_grad():
                logits = model(**without(model, tokens, removed, "delete")).logits[0, place]
            return float(logits.log_softmax(0)[target])

        assert not bound.removable[row, start + read]
        for token in range(1, len(tokens) - 1):
            expected = 0.0 if token == read else f(set()) - f({token})
            assert abs(float(omitted[row, start + token]) - expected) < 1e-12
    assert omitted[~bound.removable].abs().max() == 0
    assert omitted.abs().max() > 0.01


@pytest.mark.parametrize("removal", ["mask", "pad", "mean", "delete"])
def test_a_classifier_that_tells_its_last_token_by_the_padding_id(removal: Any) -> None:
    sizes: dict[str, Any] = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "num_labels": 3}
    config = hf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model, (ids, mask) = randomized(hf.GPT2ForSequenceClassification(config), 0), sentences([9, 6, 7])
    perturbation = Perturbation(model, removal, tokenizer=TOKENIZER)
    omitted = perturbation.bind(ids, mask, target=1).leave_one_out()
    for row in range(3):
        single = perturbation.bind(alone(ids, mask, row), target=1)
        one_by_one = [single.outputs(kept[None, None]) for kept in single.all_but_one()[0]]
        expected = single.drops(torch.cat(one_by_one, 1))
        torch.testing.assert_close(alone(omitted, mask, row), expected, rtol=1e-9, atol=1e-12)


def test_no_input_is_run_twice_nor_more_than_a_batch_at_once() -> None:
    model, (ids, mask) = classifier(), sentences([5])
    batches: list[list[list[float]]] = []
    hook = model.bert.encoder.register_forward_pre_hook(lambda _, args: batches.append(args[0].flatten(1).tolist()))
    perturbation = Perturbation(model, "mask", tokenizer=TOKENIZER, batch_size=5)
    Faithfulness(perturbation).evaluate(ids, {name: torch.rand(ids.shape) for name in "ab"}, 0, mask)
    hook.remove()
    inputs = [tuple(row) for batch in batches for row in batch]
    assert len(inputs) - len(set(inputs)) == 1  # the whole input, run first to see what is predicted
    assert len(set(inputs)) <= 2 ** int(mask.sum() - 2)
    assert max(map(len, batches)) == 5


def test_parts_of_a_corpus_are_put_together() -> None:
    model, (ids, _) = classifier(), sentences([7, 7, 7, 7])
    faithfulness = Faithfulness(Perturbation(model, "mask", tokenizer=TOKENIZER))
    scores = torch.rand(ids.shape)
    scores[3] = 1  # ranks nothing
    whole, first, rest = (
        faithfulness.evaluate(ids[part], {"": scores[part]})[""] for part in (slice(4), slice(1), slice(1, 4))
    )
    for field, value in vars(FaithfulnessScores.concatenate([first, rest])).items():
        torch.testing.assert_close(value, getattr(whole, field), rtol=1e-10, atol=1e-12, equal_nan=True)
    means = whole.means()
    assert list(means) == list(vars(whole))[:-2]
    assert means["aopc"] == float(whole.aopc.sum() / 4)
    assert whole.kendall[3].isnan()
    assert abs(means["kendall"] - float(whole.kendall[:3].mean())) < 1e-12


class Sum(nn.Module):
    """Half the sum of its tokens' numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Module = nn.Embedding.from_pretrained(torch.arange(60.0)[:, None].double())

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        embedded: Tensor = self.embedding(input_ids)[..., 0]
        return (embedded if attention_mask is None else embedded * attention_mask).sum(1) / 2


def test_any_module_will_do_and_a_linear_one_is_ranked_perfectly() -> None:
    ids, mask = torch.tensor([[5, 9, 2, 4], [8, 1, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    for removal in ("zero", 0):
        perturbation = Perturbation(Sum(), removal, keep_special=False, output="logit")
        scores = Faithfulness(perturbation, bins=[0.5], steps=4).evaluate(ids, {"": ids}, None, mask)[""]
        assert scores.morf.tolist() == [[10, 5.5, 3, 1, 0], [4.5, 0.5, 0.5, 0, 0]]
        assert scores.lerf.tolist() == [[10, 9, 7, 4.5, 0], [4.5, 4, 4, 0, 0]]
        assert scores.comprehensiveness.tolist() == [7, 4]
        assert scores.sufficiency.tolist() == [3, 0.5]
        assert scores.kendall.tolist() == [1, 1]
        assert perturbation.bind(ids, mask).leave_one_out().tolist() == [[2.5, 4.5, 1, 2], [4, 0.5, 0, 0]]


@pytest.mark.parametrize("length", [9, 100, 300])  # torch sorts short rows in another way
def test_ranks_of_equal_scores_and_rounded_shares(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, 60, (1, length), generator=generator)
    scores = torch.randint(-2, 3, (1, length), generator=generator).double()
    shares = [Fraction(number, 100) for number in range(1, 101)]
    perturbation = Perturbation(Sum(), "zero", keep_special=False, output="logit")
    faithfulness = Faithfulness(perturbation, bins=[float(share) for share in shares], steps=STEPS)
    (numbers,) = ids.tolist()

    def output(removed: set[int]) -> float:
        return float(sum(number for place, number in enumerate(numbers) if place not in removed)) / 2

    expected = derived(output, scores[0].tolist(), list(range(length)), False, shares)
    check(faithfulness.evaluate(ids, {"": scores})[""], 0, expected)


def test_leave_one_out_is_occlusion_and_linear_in_outputs() -> None:
    model, (ids, mask) = classifier(), sentences([8, 5])
    occlusion = TokenAttribution(model, FeatureAblation, tokenizer=TOKENIZER, keep_special=True)
    perturbation = Perturbation(model, "mask", tokenizer=TOKENIZER, output="logit")
    scores = occlusion.attribute(ids, 2, mask)
    torch.testing.assert_close(scores, perturbation.bind(ids, mask, target=2).leave_one_out(), rtol=1e-9, atol=1e-12)
    assert Faithfulness(perturbation).evaluate(ids, {"": scores}, 2, mask)[""].spearman.tolist() == [1, 1]
    first, second, both = (
        perturbation.bind(ids, mask, target=target).leave_one_out() for target in (2, [0, 1], Difference(2, [0, 1]))
    )
    torch.testing.assert_close(both, first - second)
    with pytest.raises(InvalidInputError, match=r'a difference of two outputs.*pass output="logit"'):
        Perturbation(model, "mask", tokenizer=TOKENIZER).bind(ids, mask, target=Difference(2, 0))


def test_the_model_is_left_as_it_was_also_when_it_raises() -> None:
    model, (ids, mask) = classifier().train(), sentences([7, 5])
    model.bert.eval()
    before = families.state_of(model)
    for removal in ("mask", "delete"):
        perturbation = Perturbation(model, removal, tokenizer=TOKENIZER)
        bound = perturbation.bind(ids, mask)
        bound.leave_one_out()

        def refuse(*_: object) -> None:
            raise ValueError("no")

        hook = model.bert.encoder.register_forward_hook(refuse)
        with pytest.raises(InvalidInputError, match="does not accept these inputs: no"):
            bound.outputs(torch.zeros(2, 1, 7, dtype=torch.bool))
        hook.remove()
        assert families.state_of(model) == before


def test_what_stands_in_for_a_token_is_what_the_model_embeds_now() -> None:
    model, (ids, mask) = classifier(), sentences([7, 5])
    before = Perturbation(model, "mask", tokenizer=TOKENIZER)
    model.get_input_embeddings().weight.data.mul_(2)
    after = Perturbation(model, "mask", tokenizer=TOKENIZER)
    assert torch.equal(*(one.bind(ids, mask, target=1).leave_one_out() for one in (before, after)))


def test_bad_input_is_refused() -> None:
    model, (ids, mask) = classifier(), sentences([7, 5])
    several, none = classifier(), torch.zeros(2, 7)
    several.config.problem_type = "multi_label_classification"
    undefined, short = torch.full((2, 7), torch.nan), torch.tensor([[1, 5], [1, SEP]])
    given: Any = {"tokenizer": TOKENIZER}
    plain = Perturbation(model, "mask", **given)
    faithful = Faithfulness(plain).evaluate
    bound = Perturbation(model, "delete", keep_special=False, **given).bind(ids, mask)
    all_removed = torch.tensor([True, False]).reshape(2, 1, 1).expand(2, 1, 7)
    without_probability = Perturbation(model, "mask", readout=lambda output, _: output.logits[:, 0], **given)
    refusals: list[tuple[Any, str]] = [
        (lambda: Perturbation(model, "mask"), "without a tokenizer"),
        (lambda: Perturbation(model, "mask", output="margin", **given), "got output='margin'"),  # type: ignore[arg-type]
        (lambda: Perturbation(model, "mask", batch_size=0, **given), "batch_size=0"),
        (lambda: Perturbation(several, "mask", **given), "multi-label classifier, whose probability is the sigmoid of"),
        (lambda: without_probability.bind(ids, mask), "has no probability"),
        (
            lambda: plain.bind(ids, mask).outputs(none + 1),
            r"torch.float32 of .* expected torch.bool of shape \(2, K, 7\)",
        ),
        (lambda: bound.outputs(all_removed), "deletion leaves no token of example 1"),
        (lambda: faithful(ids, {"": none[:, :6]}, None, mask), r"scores of shape \(2, 6\); expected \(2, 7\)"),
        (lambda: faithful(ids, {"": undefined}, None, mask), "scores contain NaN or infinity"),
        (lambda: faithful(short, {"": torch.zeros(2, 2)}), "example 1 has no token that may be removed"),
        (lambda: faithful(ids, none, None, mask), "expected a mapping from methods to tensors"),  # type: ignore[arg-type]
        (lambda: Faithfulness(plain, bins=[0.0, 0.5]), r"bins \(0.0, 0.5\); expected shares"),
        (lambda: Faithfulness(plain, steps=0), "steps=0"),
        (lambda: FaithfulnessScores.concatenate([]), "expected those of at least one batch"),
    ]
    for call, message in refusals:
        with pytest.raises(InvalidInputError, match=message):
            call()
    Perturbation(several, "mask", output="logit", **given)
    with pytest.raises(UnsupportedModelError, match="BertModel returns no logits"):
        Perturbation(model.bert, tokenizer=TOKENIZER).bind(ids, mask)


def test_signature_says_what_changes_scores() -> None:
    model = classifier()
    signatures = {
        Faithfulness(Perturbation(model, removal, tokenizer=TOKENIZER, keep_special=special, output=output)).signature
        for removal in ("mask", "pad", "mean", "zero", "delete", 17, torch.zeros(32))
        for special in (True, False)
        for output in ("probability", "logit")
    }
    assert len(signatures) == 28
    perturbation = Perturbation(model, 17, tokenizer=TOKENIZER, keep_special=False)
    signature = Faithfulness(perturbation, bins=[0.2], steps=5).signature
    assert signature == "removal:id:17|special:removed|output:probability|bins:0.2|steps:5"


@pytest.mark.parametrize("seed", range(4))
def test_agreement_is_the_mean_over_examples_where_it_is_defined(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(3, 12, generator=generator)
    second = (first + torch.randn(3, 12, generator=generator)).round()  # many are equal
    compared = torch.rand(3, 12, generator=generator) < 0.8
    second[1] = 0
    compared[1, 1:] = seed > 1  # one token alone has no order either
    rows = [[values[row, compared[row]].tolist() for values in (first, second)] for row in (0, 2)]
    for coefficient, function in (("spearman", rho), ("kendall", tau)):
        table = agreement({"a": first, "b": second}, compared, coefficient)  # type: ignore[arg-type]
        expected = mean(function(*row) for row in rows)
        torch.testing.assert_close(table, torch.tensor([[1, expected], [expected, 1]], dtype=torch.float64))
        assert agreement({"a": first, "b": -first}, compared, coefficient)[0, 1] == -1  # type: ignore[arg-type]


def test_agreement_of_bad_input_is_refused() -> None:
    scores, compared = torch.rand(3, 12), torch.ones(3, 12, dtype=torch.bool)
    with pytest.raises(InvalidInputError, match=r"shapes \(3, 12\), \(3, 11\), \(3, 12\); expected \(B, S\)"):
        agreement({"a": scores, "b": scores[:, 1:]}, compared)
    with pytest.raises(InvalidInputError, match="got coefficient='pearson'; expected one of spearman, kendall"):
        agreement({"a": scores}, compared, "pearson")  # type: ignore[arg-type]
