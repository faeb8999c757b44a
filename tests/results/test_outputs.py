"""A result names the output that it is of: that of the plain call, for each text and each kind of head."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from captum.attr import IntegratedGradients
from torch import Tensor, nn

import captum_norm as cn
from captum_norm import explain
from captum_norm.explanation import Explanation
from captum_norm.methods import METHODS
from captum_norm.models.outputs import name_outputs
from captum_norm.results.outputs import NamedOutput
from tests import tiny
from tests.tiny import WORDS, bert_config, tokenizer

TEXTS = ["a dog sees the cat", "the cat runs", "a dog", "cat the dog sees the dog"]
LABELS = {0: "calm", 1: "sad", 2: "merry"}


def config_with(**options: Any) -> Any:
    """The tiny BERT's configuration, changed."""
    config = bert_config()
    config.update(options)
    return config


def logits_of(model: Any, texts: list[str] = TEXTS) -> Tensor:
    """The logits of each text alone, by the plain call; of a model with one at each position the last one's."""
    rows = []
    for text in texts:
        with torch.no_grad():
            (row,) = model(**tokenizer()(text, return_tensors="pt")).logits
        rows.append(row if row.dim() == 1 else row[-1])
    return torch.stack(rows)


def classifier(**options: Any) -> Any:
    """A classifier of three classes that predicts different ones for different texts."""
    torch.manual_seed(1)
    config = config_with(id2label=LABELS, initializer_range=1.0, **options)
    model = transformers.BertForSequenceClassification(config).train(False)
    model.classifier.bias.data -= logits_of(model).mean(0)
    assert len(set(logits_of(model).argmax(1).tolist())) > 1
    return model


def gpt2() -> Any:
    return tiny.gpt2(initializer_range=1.0)


NAMES = [name for name in METHODS if name not in ("lime", "shapley")]


@pytest.mark.parametrize("kind", [classifier, gpt2])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:Setting forward, backward hooks")
def test_each_text_has_its_own_prediction(kind: Any, name: str) -> None:
    model = kind()
    logits = logits_of(model)
    try:
        found = explain(TEXTS, model, tokenizer(), method=name, page=False)
    except cn.UnsupportedModelError:
        assert name == "globenc"  # which post-norm layers alone have
        return
    names = LABELS.values() if kind is classifier else WORDS
    for output, row in zip(found.outputs, logits, strict=True):
        assert output.index == int(row.argmax())
        assert output.name == list(names)[output.index]
        assert output.value == pytest.approx(float(row.max()), rel=1e-4)
        shares = row.softmax(0)
        assert output.probability == pytest.approx(float(shares.max()), rel=1e-4)
        assert [share for _, share in output.top] == pytest.approx(shares.topk(3).values.tolist(), rel=1e-3)
        assert output.top[0][0] == output.name
        assert output.explained == (METHODS[name].target != "never")
    for number, single in enumerate(found):
        assert single.outputs == [found.outputs[number]]


@pytest.mark.parametrize("name", ["decompx", "saliency", "attention-gradient", "alti-logit"])
def test_a_target_is_named_beside_the_prediction(name: str) -> None:
    model = classifier()
    logits = logits_of(model)
    given = [0, 1, 2, 1]
    found = explain(TEXTS, model, tokenizer(), method=name, target=given, page=False)
    assert [output.name for output in found.outputs] == [LABELS[index] for index in given]
    for output, row, index in zip(found.outputs, logits, given, strict=True):
        assert output.probability == pytest.approx(float(row.softmax(0)[index]), rel=1e-4)
        assert output.top[0][0] == LABELS[int(row.argmax())]
    pair: Any = cn.Difference("sad", "calm")  # type: ignore[arg-type]
    for output, row in zip(explain(TEXTS, model, tokenizer(), method=name, target=pair).outputs, logits, strict=True):
        assert (output.index, output.name, output.probability) == ((1, 0), "sad − calm", None)
        assert output.value == pytest.approx(float(row[1] - row[0]), rel=1e-3)
        assert str(output) == f"sad − calm = {output.value:.3g}"


def test_probabilities_are_those_of_the_head() -> None:
    shared, apart, numbers = classifier(), classifier(), classifier()
    apart.config.problem_type, numbers.config.problem_type = "multi_label_classification", "regression"
    first = logits_of(shared)[0]
    best = int(first.argmax())
    for model, expected in ((shared, first.softmax(0)[best]), (apart, first[best].sigmoid()), (numbers, None)):
        (output,) = explain(TEXTS[0], model, tokenizer()).outputs
        assert output.probability == (None if expected is None else pytest.approx(float(expected), rel=1e-4))
        compared = cn.compare(model, TEXTS[:1], tokenizer=tokenizer(), methods=["norm"], steps=2)
        assert compared.explained == ("probability" if model is shared else "logit")
        assert compared.outputs[0].probability == output.probability
    torch.manual_seed(0)
    one = transformers.BertForSequenceClassification(config_with(num_labels=1)).train(False)
    (output,) = explain(TEXTS[0], one, tokenizer(), method="gim").outputs
    assert output.probability is None
    assert output.value == pytest.approx(float(logits_of(one)[0]), rel=1e-4)
    assert "top 3" not in output.facts()


def test_scores_that_are_probabilities_stay_as_they_are() -> None:
    model, shares = nn.Linear(1, 1), torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])
    assert [output.probability for output in name_outputs(model, shares, torch.tensor([0, 1]))] == pytest.approx(
        [0.7, 0.3]
    )
    logs = [output.probability for output in name_outputs(model, shares.log(), torch.tensor([0, 1]))]
    assert logs == pytest.approx([0.7, 0.3])


def test_a_readout_has_no_probability_and_no_label() -> None:
    model = classifier()

    def spread(output: Any, real: Tensor) -> Tensor:  # noqa: ARG001
        numbers: Tensor = output.logits.std(1)
        return numbers

    method = cn.AttnLRP(model, readout=lambda output, real: output.logits[:, 1:] * 2)  # noqa: ARG005
    logits = logits_of(model)
    for output, row in zip(explain(TEXTS, method=method, tokenizer=tokenizer()).outputs, logits, strict=True):
        assert (output.name, output.probability) == (str(output.index), None)
        assert output.value == pytest.approx(2 * float(row[1:].max()), rel=1e-3)
    single = cn.TokenAttribution(model, IntegratedGradients, readout=spread, tokenizer=tokenizer(), n_steps=2)
    (output,) = explain(TEXTS[0], method=single).outputs
    assert (output.index, output.name, output.probability) == (None, "the only number", None)
    assert output.value == pytest.approx(float(logits[0].std()), rel=1e-3)


def test_a_tagger_has_an_output_where_one_is_read() -> None:
    torch.manual_seed(0)
    model: Any = transformers.BertForTokenClassification(config_with(id2label=LABELS)).train(False)
    assert explain(TEXTS[:2], model, tokenizer()).outputs == []
    places = [2, 1]
    for name in ("norm", "decompx", "input-gradient"):
        found = explain(TEXTS[:2], model, tokenizer(), method=name, position=places)
        for text, output, place in zip(TEXTS, found.outputs, places, strict=False):
            row = model(**tokenizer()(text, return_tensors="pt")).logits[0, place].detach()
            assert (output.index, output.name) == (int(row.argmax()), LABELS[int(row.argmax())])
            assert output.probability == pytest.approx(float(row.softmax(0).max()), rel=1e-4)


def test_models_without_a_head_have_the_projection_or_none() -> None:
    torch.manual_seed(0)
    bert: Any = transformers.BertModel(config_with()).train(False)
    assert explain(TEXTS, bert, tokenizer()).outputs == []
    found = explain(TEXTS, bert, tokenizer(), method="decompx")
    for output, text in zip(found.outputs, TEXTS, strict=True):
        states = bert(**tokenizer()(text, return_tensors="pt")).last_hidden_state[0].detach()
        assert output.value == pytest.approx(float(states.mean(0).norm()), rel=1e-3)
        assert (output.probability, output.top) == (None, ())
        assert output.name.startswith("projection")


@pytest.mark.parametrize("bias", ["apart", "absdot"])
def test_parts_of_one_text_are_no_batch(bias: Any) -> None:
    """As many equal texts as one of them has copies among the parts of its tokens."""
    model, text = classifier(), "a dog"
    texts = [text] * (4 + 2)
    method = cn.DecompX(model, bias)
    for output in explain(texts, method=method, tokenizer=tokenizer(), page=False).outputs:
        assert output.value == pytest.approx(float(logits_of(model, [text]).max()), rel=1e-4)


def test_a_long_text_is_not_its_excerpt() -> None:
    text = " ".join(["the cat sees a dog"] * 12)
    torch.manual_seed(0)
    config = config_with(id2label=LABELS, initializer_range=1.0, max_position_embeddings=80)
    model: Any = transformers.BertForSequenceClassification(config).train(False)
    expected = float(logits_of(model, [text]).max())
    for name in ("norm", "decompx", "attention-gradient", "random"):
        (output,) = explain(text, model, tokenizer(), method=name, page=False).outputs
        assert output.value == pytest.approx(expected, rel=1e-4)


ANSWER = " a tiny silver ring"


@pytest.mark.parametrize("method", [cn.NormAttribution, cn.ALTI, cn.DecompX, cn.AttentionTimesGradient])
@pytest.mark.parametrize("outputs", [None, (1, 3)])
def test_each_token_of_an_answer_has_its_probability(method: Any, outputs: Any) -> None:
    from captum_norm.loading import LANGUAGE_MODEL, load

    model, words = load(LANGUAGE_MODEL)
    prompt = "Clara found a tiny silver ring.\nWhat did Clara find? Clara found"
    for options in ({}, {"aggregation": "mean"} if method is cn.NormAttribution else {}):
        generation = cn.GenerationAttribution(method(model, **options), words)
        result = generation.attribute(prompt, ANSWER, outputs=outputs)
        first, end = result.explained.outputs
        start, answer = words(prompt)["input_ids"], words(ANSWER, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*start, *answer]])
        shares = model(ids).logits[0].softmax(1).detach()
        for place, output in zip(range(first, end), result.outputs, strict=True):
            row = shares[len(start) + place - 1]
            assert output.index == answer[place]
            assert output.probability == pytest.approx(float(row[answer[place]]), rel=1e-3)
            assert output.top[0][1] == pytest.approx(float(row.max()), rel=1e-3)
        assert result[0].outputs == result.outputs[:1]
        assert result.probability == pytest.approx(
            float(torch.tensor([output.probability for output in result.outputs]).prod()), rel=1e-5
        )
        by_word = result.words()
        assert by_word.probability == pytest.approx(result.probability)
        assert [record["probability"] for record in by_word.records()[:: len(by_word.input_tokens)]] == [
            by_word.probability,
            *(output.probability for output in by_word.outputs),
        ]
        assert result.explained.model == type(model).__name__


def test_an_encoder_decoders_answer_and_a_contrast() -> None:
    model = tiny.t5()
    source = tokenizer()("a cat runs", return_tensors="pt")["input_ids"]
    answer = tokenizer()("the dog", add_special_tokens=False)["input_ids"]
    decoder = torch.tensor([[0, *answer[:-1]]])
    shares = model(input_ids=source, decoder_input_ids=decoder).logits[0].softmax(1).detach()
    for method in (cn.NormAttribution(model), cn.ALTI(model), cn.AttnLRP(model)):
        result = cn.GenerationAttribution(method, tokenizer()).attribute("a cat runs", answer)
        for row, output, index in zip(shares, result.outputs, answer, strict=True):
            assert (output.index, output.name) == (index, WORDS[index])
            assert output.probability == pytest.approx(float(row[index]), rel=1e-4)
    rival = [answer[0], WORDS.index("cat")]
    result = cn.GenerationAttribution(cn.AttnLRP(model), tokenizer()).attribute("a cat runs", answer, contrast=rival)
    (output,) = result.outputs
    assert (output.index, output.name, output.probability) == ((answer[1], rival[1]), "dog − cat", None)


def test_it_is_said_first(tmp_path: Path) -> None:
    model = classifier()
    found = explain(TEXTS, model, tokenizer(), method="decompx")
    single = found[0]
    (output,) = single.outputs
    assert repr(single).startswith(f"Explanation(explained {output}; ")
    assert list(single.facts().items())[:2] == list(output.facts().items())
    assert list(explain(TEXTS[0], model, tokenizer()).facts())[:2] == ["prediction", "top 3"]
    records = found.records()
    assert [row["output"] for row in records if row["index"] == 0] == [output.name for output in found.outputs]
    assert list(records[0])[:4] == ["example", "output", "value", "probability"]
    assert {best.text for best in found.top(1000)} == {0, 1, 2, 3}
    page = found.page()
    assert [example.facts["explained"] for example in page.examples] == list(map(str, found.outputs))
    for name in ("a.safetensors", "a.html", "a.csv", "a.json"):
        assert found.save(tmp_path / name).stat().st_size
    assert Explanation.load(tmp_path / "a.safetensors") == found
    assert str(output) in (tmp_path / "a.html").read_text()
    for name in ("a.png", "a.svg", "a.PDF"):
        assert single.save(tmp_path / name).stat().st_size
    with pytest.raises(cn.InvalidInputError, match=r"^got a file name with the suffix '\.txt'; expected one of \.safe"):
        found.save(tmp_path / "a.txt")
    with pytest.raises(cn.InvalidInputError, match=r"suffix ''; expected one of \.safetensors, \.html, \.png"):
        found.save(tmp_path / "a")


def test_names_and_shares_are_readable() -> None:
    assert str(NamedOutput(3, " ring", 1.5, 0.931)) == "“ ring”, 0.93"
    assert str(NamedOutput(3, "ring", 1.5, 0.00002)) == "ring, 2e-05"
    assert str(NamedOutput(None, "the only number", -1.5)) == "the only number = -1.5"
    assert str(NamedOutput(None, "a", float("nan"))) == "a"
