"""Log-probabilities and beam search, against the model run step by step and exhaustive search written out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alignment.fairseq.conversion import build_model
from alignment.fairseq.loading import load_shipped_model
from alignment.fairseq.tokenizer import EOS, PAD, SPECIAL, Dictionary, FairseqTokenizer, Segmenter
from alignment.teacher_forcing import teacher_forced_batches
from alignment.tokenization import EncodedSentence
from alignment.translation import emitted_steps, log_probabilities, target_log_probabilities, translate
from captum_norm import InvalidInputError, UnsupportedModelError
from tests.alignment.fairseq.small import SOURCE, TARGET, settings, weights
from tests.alignment.translation_models import FAMILIES, PAIRS, SOURCES, made
from tests.families import state_of
from tests.versions import since


def step_by_step(model: Any, tokenizer: Any, pair: Any) -> list[float]:
    """The log-probability of each piece of the words and of the end of sentence, by a pass for each."""
    (batch,) = teacher_forced_batches(model, tokenizer, [pair])
    words = [step for step, index in enumerate(batch.target[0].word_ids) if index is not None]
    found = []
    for step in range(words[0], min(words[-1] + 2, len(batch.target[0].ids))):
        read = batch.inputs["decoder_input_ids"][:, : step + 1]
        with torch.no_grad():
            logits = model(input_ids=batch.inputs["input_ids"], decoder_input_ids=read, use_cache=False).logits[0, -1]
        exponentials = [float(number) for number in logits.double().exp()]
        found.append(float(np.log(exponentials[batch.target[0].ids[step]] / sum(exponentials))))
    return found


@pytest.mark.few
@pytest.mark.parametrize(("name", "seed"), [("Marian", 0), ("NLLB", 1), ("mBART", 2), ("T5", 3), ("BART", 4)])
def test_log_probabilities_are_those_of_each_step(name: str, seed: int, tmp_path: Path) -> None:
    model, tokenizer = made(name, tmp_path, seed)
    before = state_of(model)
    found = dict(target_log_probabilities(model, tokenizer, PAIRS, max_tokens=60))
    assert sorted(found) == list(range(len(PAIRS)))
    for index, pair in enumerate(PAIRS):
        np.testing.assert_allclose(found[index], step_by_step(model, tokenizer, pair), rtol=2e-5, atol=2e-5)
    assert state_of(model) == before


def test_models_without_a_head_and_foreign_labels_are_refused(tmp_path: Path) -> None:
    model, tokenizer = made("Marian", tmp_path)
    with pytest.raises(UnsupportedModelError, match="got a MarianModel, expected a model with a lang"):
        list(target_log_probabilities(model.model, tokenizer, PAIRS))
    with pytest.raises(InvalidInputError, match="got the label 7, expected -100 or one of the model's 5 pieces"):
        log_probabilities(torch.zeros(1, 2, 5), torch.tensor([[1, 7]]))


@pytest.mark.parametrize(
    ("word_ids", "steps"),
    [
        ([0, 1, None], [0, 1, 2]),
        ([None, 0, 0, None, None], [1, 2, 3]),
        ([0, 1], [0, 1]),  # no end of sentence
    ],
)
def test_emitted_steps(word_ids: list[int | None], steps: list[int]) -> None:
    assert list(range(len(word_ids)))[emitted_steps(EncodedSentence([0] * len(word_ids), word_ids))] == steps


SENTENCES = [source.split() for source in SOURCES]
LINES = ["le débat est clos .", "oui", "", "je vous remercie de votre attention .", "merci ."]
FRENCH = [line.split() for line in LINES]
ENGLISH = ["the debate is closed .", "yes", "", "thank you for your attention .", "thank you ."]


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, Any]:
    return load_shipped_model("fr-en")


def small_fairseq(seed: int) -> tuple[Any, FairseqTokenizer]:
    """A random model of fairseq that is sure of nothing, and whose words are its pieces."""
    sides = []
    for size in (SOURCE, TARGET):
        symbols = (*SPECIAL, *(f"word{index}" for index in range(len(SPECIAL), size)))
        ids = {symbol: index for index, symbol in enumerate(symbols)}
        sides.append(("xx", Dictionary(symbols, ids), Segmenter()))
    parts = weights(tied=False, seed=seed)
    parts["decoder.output_projection.weight"] /= 4
    model = build_model(settings(share_decoder_input_output_embed=False), parts)
    return model.double(), FairseqTokenizer(*sides)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=since("5.13", "FSMT decodes otherwise than it reads")) if name == "FSMT" else name
        for name in FAMILIES
    ],
)
def test_greedy_search_takes_the_most_likely_piece_each_time(name: str, tmp_path: Path) -> None:
    model, tokenizer = made(name, tmp_path)
    model.generation_config.do_sample = True  # the user's, and not what is asked for here
    length = 8
    found = translate(model, tokenizer, SENTENCES, beam=1, max_length=length)
    ends = {model.generation_config.eos_token_id, model.generation_config.forced_eos_token_id}
    for sentence, words in zip(SENTENCES, found, strict=True):
        [batch] = teacher_forced_batches(model, tokenizer, [(sentence, ["a"])])
        special = batch.target[0].word_ids.index(0)
        read = batch.inputs["decoder_input_ids"][:, : special + 1]
        emitted: list[int] = []
        forced = model.generation_config.forced_eos_token_id is not None
        while len(emitted) < length - forced and not ends & set(emitted):
            inputs = batch.inputs | {"decoder_input_ids": read, "decoder_attention_mask": torch.ones_like(read)}
            with torch.no_grad():
                best = model(**inputs).logits[:, -1:].argmax(-1)
            emitted.append(int(best))
            read = torch.cat([read, best], 1)
        assert words == tokenizer.decode_target(emitted)


@since("5.18", "beams cannot be as many as all pieces")
@pytest.mark.parametrize("seed", [7, 9, 10])
def test_a_beam_of_everything_finds_the_best(seed: int) -> None:
    """Translations of at most two pieces, by their mean log-probability, end included."""
    model, tokenizer = small_fairseq(seed)
    sentence = ["word4", "word9", "word6"]
    [source] = tokenizer.encode_source([sentence])
    pieces = [index for index in range(TARGET) if index != PAD]
    with torch.no_grad():
        starts = torch.tensor([[EOS, piece] for piece in pieces])
        logits = model(torch.tensor([source.ids] * len(starts)), decoder_input_ids=starts).logits
    logits[..., PAD] = -torch.inf  # which build_model forbids
    first, second = logits[0, 0].log_softmax(-1), logits[:, 1].log_softmax(-1)
    scores: dict[tuple[int, ...], float] = {(EOS,): float(first[EOS])}
    for row, piece in enumerate(pieces):
        if piece != EOS:
            scores |= {(piece, other): float(first[piece] + second[row, other]) / 2 for other in pieces}
    best = max(scores, key=lambda candidate: scores[candidate])
    [found] = translate(model, tokenizer, [sentence], beam=2 * TARGET, max_length=2)
    assert found == tokenizer.decode_target(best)
    assert translate(model, tokenizer, [sentence], beam=1, max_length=2) != [found]


def test_real_sentences_keep_their_order_and_their_batches_do_not_matter(
    shipped: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = shipped
    shapes: list[torch.Size] = []
    generate = model.generate

    def watched(*, input_ids: torch.Tensor, **options: Any) -> Any:
        shapes.append(input_ids.shape)
        assert options["use_cache"]  # without one, FSMT's decoder sees what it has yet to emit
        return generate(input_ids=input_ids, **options)

    monkeypatch.setattr(model, "generate", watched)
    assert [" ".join(words) for words in translate(model, tokenizer, FRENCH)] == ENGLISH
    assert len(shapes) == 1
    shapes.clear()
    assert [" ".join(words) for words in translate(model, tokenizer, FRENCH, beam=3, max_tokens=60)] == ENGLISH
    assert len(shapes) > 1
    # Beside each source, the batches hold a target of two or three pieces.
    assert all(count == 1 or 3 * count * (length + 2) <= 60 for count, length in shapes)
    assert translate(model, tokenizer, []) == []
    assert translate(model, tokenizer, [[]]) == [[]]


def test_the_model_is_left_as_it_was(shipped: tuple[Any, Any]) -> None:
    model, tokenizer = shipped
    model.generation_config.max_new_tokens = 3  # the user's: the arguments go before it
    before = model.generation_config.to_dict(), dict(vars(model)), {k: v.clone() for k, v in model.state_dict().items()}
    try:
        assert translate(model, tokenizer, FRENCH[:1]) == [ENGLISH[0].split()]
        assert model.generation_config.to_dict() == before[0]
    finally:
        model.generation_config.max_new_tokens = None
    assert vars(model) == before[1]
    assert all(torch.equal(value, before[2][name]) for name, value in model.state_dict().items())


def test_the_longest_translation(shipped: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = shipped
    sentence = FRENCH[3]
    # Every word is one piece.
    assert translate(model, tokenizer, [sentence], beam=1, max_length=6) == [ENGLISH[3].split()]
    assert translate(model, tokenizer, [sentence], beam=1, max_length=3) == [ENGLISH[3].split()[:3]]
    endless, words = made("BART", tmp_path)  # it has 128 positions
    [found] = translate(endless, words, SENTENCES[:1], beam=1, max_length=1000)
    assert 100 < len("".join(found)) < 1000


def test_sentences_that_cannot_be_used(shipped: tuple[Any, Any]) -> None:
    model, tokenizer = shipped
    sentences = [["\u200b"], FRENCH[0], [], ["le"] * 1100]
    told: list[tuple[int, str]] = []
    found = translate(model, tokenizer, sentences, on_error=lambda index, error: told.append((index, str(error))))
    assert [" ".join(words) for words in found] == ["", ENGLISH[0], "", ""]
    assert sorted(told) == [
        (0, "got a source side without a word, expected at least one that the tokenizer keeps"),
        (3, "got a source side of 1101 pieces, expected at most 1024, the number of positions that the model has"),
    ]
    with pytest.raises(InvalidInputError, match=r"^sentence 2: got a source side without a word"):
        translate(model, tokenizer, [FRENCH[0], [], sentences[0]])


@pytest.mark.parametrize("name", ["beam", "max_length", "max_tokens"])
def test_numbers_below_one_are_refused(shipped: tuple[Any, Any], name: str) -> None:
    options: dict[str, Any] = {name: 0}
    with pytest.raises(InvalidInputError, match=f"got .*{name}=0.*, expected at least 1 of each"):
        translate(*shipped, FRENCH, **options)


def test_models_that_cannot_translate_are_refused(shipped: tuple[Any, Any]) -> None:
    model, tokenizer = shipped
    for texts in ("le chat noir", ["le chat noir"]):
        with pytest.raises(InvalidInputError, match="got the string 'le chat noir'; expected a list of sentences"):
            translate(model, tokenizer, texts)
    with pytest.raises(InvalidInputError, match=r"got a MarianModel, which has no generate\(\); expected"):
        translate(model.model, tokenizer, FRENCH)
    model.train()
    try:
        with pytest.raises(InvalidInputError, match=r"in training mode, .*; call model\.eval\(\)"):
            translate(model, tokenizer, FRENCH)
    finally:
        model.eval()
