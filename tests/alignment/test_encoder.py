"""Links by an encoder against the papers' formulas, its maps against the methods' own, and what it refuses."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers as hf
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

import captum_norm as cn
from alignment import EncoderAligner, HuggingFaceTokenizer, Lexicon, WordAligner
from alignment.decoding import itermax, mutual_argmax
from alignment.encoder import encoder_of
from alignment.links import Alignment
from alignment.recipes import RECIPES, Recipe
from alignment.selection import Choice, consistency
from captum_norm import InvalidInputError
from tests.alignment.translation_models import FAMILIES, PAIRS, random_model
from tests.families import randomized

SYLLABLES = ["".join(letters) for letters in product("bdgklm", "aeiou")]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *SYLLABLES, *(f"##{one}" for one in SYLLABLES)]
SIZES: Any = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
Matrix = NDArray[np.float64]
Linked = NDArray[np.bool_]
Pairs = list[tuple[list[str], list[str]]]


def tokenizer() -> hf.BertTokenizer:
    """Cuts words into syllables."""
    return hf.BertTokenizer(vocab={piece: index for index, piece in enumerate(VOCABULARY)}, do_lower_case=False)


def bert(seed: int, kind: str = "BertModel", **settings: Any) -> Any:
    """A small BERT of random weights, biases and gains, in float64."""
    config = hf.BertConfig(vocab_size=len(VOCABULARY), **{**SIZES, "max_position_embeddings": 40, **settings})
    return randomized(lambda: getattr(hf, kind)(config), seed, torch.float64)


def aligner(model: Any, *layer: Any, **options: Any) -> EncoderAligner:
    return EncoderAligner(model, HuggingFaceTokenizer(tokenizer()), *layer, **options)


def sentences(seed: int, count: int = 12) -> Pairs:
    """Pairs of 1 to 8 words of one to three syllables."""
    generator = np.random.default_rng(seed)

    def words() -> list[str]:
        return ["".join(generator.choice(SYLLABLES, generator.integers(1, 4))) for _ in range(generator.integers(1, 9))]

    return [(words(), words()) for _ in range(count)]


def pieces_of(words: Sequence[str]) -> list[int]:
    """The word of each piece, by its length: a syllable has two letters."""
    return [index for index, word in enumerate(words) for _ in range(len(word) // 2)]


def states(model: Any, words: Sequence[str], layer: int) -> Matrix:
    """The states of one sentence's pieces, without special tokens."""
    with torch.no_grad():
        output = model(**tokenizer()(" ".join(words), return_tensors="pt"), output_hidden_states=True)
    found: Matrix = output.hidden_states[1 + layer][0, 1:-1].numpy()
    return found


def softmax(matrix: Matrix, axis: int) -> Matrix:
    powers = np.exp(matrix - matrix.max(axis, keepdims=True))
    divided: Matrix = powers / powers.sum(axis, keepdims=True)
    return divided


def by_softmax(source: Matrix, target: Matrix) -> Linked:
    """Dou & Neubig 2021: A = (softmax over targets > c) ∧ (softmax over sources > c)."""
    similarity = source @ target.T
    return (softmax(similarity, 1) > 0.001) & (softmax(similarity, 0) > 0.001)


def cosines(source: Matrix, target: Matrix) -> Matrix:
    lengths = np.linalg.norm(source, axis=1)[:, None] * np.linalg.norm(target, axis=1)
    moved: Matrix = (source @ target.T / lengths + 1) / 2
    return moved


def best_of_both(similarity: Matrix) -> Linked:
    """Jalili Sabet et al. 2020: S_ij is the highest of its row and of its column."""
    linked: Linked = (similarity == similarity.max(1, keepdims=True)) & (similarity == similarity.max(0, keepdims=True))
    return linked


def by_itermax(similarity: Matrix) -> Linked:
    """Jalili Sabet et al. 2020: a second round with α = 0.9 for linked rows and columns, entry by entry."""
    first = best_of_both(similarity)
    if min(similarity.shape) <= 2 or first.any(1).all() or first.any(0).all():
        return first
    again = similarity.copy()
    for i, j in np.ndindex(*similarity.shape):
        again[i, j] *= (1.0, 0.9, 0.0)[int(first[i].any()) + int(first[:, j].any())]
    linked: Linked = first | (best_of_both(again) & (again > 0))
    return linked


EXPECTED: dict[str, Callable[[Matrix, Matrix], Linked]] = {
    "softmax": by_softmax,
    "argmax": lambda source, target: best_of_both(cosines(source, target)),
    "itermax": lambda source, target: by_itermax(cosines(source, target)),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("recipe", EXPECTED)
def test_links_are_those_of_the_papers(recipe: str, seed: int) -> None:
    model, pairs = bert(seed), sentences(seed, 40)
    found = aligner(model, 1, recipe=recipe, max_tokens=150).align(*zip(*pairs, strict=True))
    for (source, target), links in zip(pairs, found, strict=True):
        linked = EXPECTED[recipe](states(model, source, 1), states(model, target, 1))
        words = pieces_of(source), pieces_of(target)
        assert links == Alignment((words[0][i], words[1][j]) for i, j in np.argwhere(linked).tolist())
    assert sum(map(len, found)) > len(pairs)


@pytest.mark.parametrize("seed", range(5))
def test_itermax_of_any_map(seed: int) -> None:
    generator = np.random.default_rng(seed)
    gained = 0
    for _ in range(30):
        word_map = generator.random(generator.integers(1, 9, size=2))
        links = itermax(word_map, null=False)
        assert links == Alignment((int(j), int(i)) for i, j in np.argwhere(by_itermax(word_map)))
        assert links == itermax(np.pad(word_map, ((0, 0), (0, 1)), constant_values=9.0))
        gained += len(links - mutual_argmax(word_map, null=False))
    assert gained


def summed(matrix: Matrix, words: Sequence[Sequence[int]], counts: Sequence[int]) -> Matrix:
    """A map of pieces -> the mean over a row's pieces of the sums over a column's."""
    rows, columns = (np.equal.outer(range(count), ids) for count, ids in zip(counts, words, strict=True))
    merged: Matrix = rows @ matrix @ columns.T / rows.sum(1, keepdims=True)
    return merged


AWI, AWO = Recipe(null=True), Recipe(combination="minimum")


def maps_of(aligned: EncoderAligner, pairs: Pairs) -> list[Matrix]:
    return [cast(Matrix, word_map) for _, word_map in sorted(aligned.map_each(pairs), key=lambda answer: answer[0])]


@pytest.mark.parametrize("seed", range(3))
def test_similarities_of_words(seed: int) -> None:
    model, pairs = bert(seed), sentences(seed)
    found = [maps_of(aligner(model, 2, recipe=recipe), pairs) for recipe in (AWI, AWO)]
    for (source, target), rows, least in zip(pairs, *found, strict=True):
        similarity = states(model, target, 2) @ states(model, source, 2).T
        words, counts = (pieces_of(target), pieces_of(source)), (len(target), len(source))
        of_target = summed(softmax(similarity, 1), words, counts)
        of_source = summed(softmax(similarity, 0).T, words[::-1], counts[::-1]).T
        for word_map, expected in ((rows, of_target), (least, np.minimum(of_target, of_source))):
            np.testing.assert_allclose(word_map[:, :-1], expected, rtol=0, atol=2e-6)  # merged in float32
            assert not word_map[:, -1].any()


@pytest.mark.parametrize("seed", range(3))
def test_similarities_of_embeddings(seed: int) -> None:
    model, pairs = bert(seed), sentences(seed)
    table = model.embeddings.word_embeddings.weight.detach().numpy()
    found = maps_of(aligner(model, source="embeddings", recipe=AWO), pairs)
    for (source, target), least in zip(pairs, found, strict=True):
        vectors = [
            [table[VOCABULARY.index(piece)] for piece in tokenizer().tokenize(" ".join(words))]
            for words in (source, target)
        ]
        similarity = np.array(
            [
                [first @ second / np.sqrt(first @ first * (second @ second)) * 24**0.5 for second in vectors[0]]
                for first in vectors[1]
            ]
        )
        words, counts = (pieces_of(target), pieces_of(source)), (len(target), len(source))
        of_target = summed(softmax(similarity, 1), words, counts)
        of_source = summed(softmax(similarity, 0).T, words[::-1], counts[::-1]).T
        np.testing.assert_allclose(least[:, :-1], np.minimum(of_target, of_source), rtol=0, atol=2e-6)


METHODS = {
    "norm": cn.NormAttribution,
    "alti": cn.ALTI,
    "value-zeroing": cn.ValueZeroing,
    "weights": cn.AttentionWeights,
}


@pytest.mark.parametrize("source", METHODS)
def test_maps_of_joined_sides(source: str) -> None:
    model, pairs = bert(7, "BertForMaskedLM"), sentences(7, 6)
    method: Any = METHODS[source](model.bert)
    options: Any = {"source": source, "head": "all"}
    found = [maps_of(aligner(model, 1, **options, recipe=recipe), pairs) for recipe in (AWI, AWO)]
    joined = maps_of(aligner(model, 1, source=method, head="all", recipe=AWI, max_tokens=1), pairs)
    for pair, rows, least, alone in zip(pairs, *found, joined, strict=True):
        encoded = tokenizer()(*map(" ".join, pair), return_tensors="pt")
        full = method.maps(dict(encoded)).encoder[0, 1].numpy()
        first, second = map(pieces_of, pair)
        of_first, of_second = slice(1, 1 + len(first)), slice(2 + len(first), -1)
        counts = [len(words) for words in pair]
        of_target = summed(full[of_second, of_first], (second, first), counts[::-1])
        of_source = summed(full[of_first, of_second], (first, second), counts).T
        special = full[of_second][:, [0, 1 + len(first), -1]].sum(1, keepdims=True)
        null = summed(special, (second, [0]), (counts[1], 1))
        bound = 1e-5 * max(1, full.max())
        np.testing.assert_allclose(rows, np.hstack([of_target, null]), rtol=0, atol=bound)
        np.testing.assert_allclose(alone, rows, rtol=0, atol=bound)
        np.testing.assert_allclose(least[:, :-1], np.minimum(of_target, of_source), rtol=0, atol=bound)


@pytest.mark.parametrize("source", ["similarity", *METHODS])
def test_the_layer_is_the_most_consistent_one(source: str) -> None:
    model, pairs = bert(3), sentences(3)
    head = None if source == "similarity" else "all"
    sides = cast(Any, list(zip(*pairs, strict=True)))

    def rate(layer: int) -> float:
        maps = maps_of(aligner(model, layer, source=source, head=head, recipe=AWI), pairs)
        return consistency(list(map(mutual_argmax, maps)), *sides)

    chosen = aligner(model, source=source, head=head)
    chosen.align(*sides)
    assert chosen.choice == Choice("AWI", max(range(3), key=rate))


def test_one_head_of_both_directions() -> None:
    model, pairs = bert(4), sentences(4)
    full = cn.NormAttribution(model).maps(
        dict(tokenizer()(*map(" ".join, pairs[0]), return_tensors="pt")), per_head=True
    )
    [least, *_] = maps_of(aligner(model, 2, "norm", head=1, recipe=AWO), pairs)
    first, second = map(pieces_of, pairs[0])
    matrix = cast(Any, full.encoder)[0, 2, 1].numpy()
    of_target = summed(
        matrix[2 + len(first) : -1, 1 : 1 + len(first)], (second, first), [len(one) for one in pairs[0][::-1]]
    )
    of_source = summed(
        matrix[1 : 1 + len(first), 2 + len(first) : -1], (first, second), [len(one) for one in pairs[0]]
    ).T
    np.testing.assert_allclose(least[:, :-1], np.minimum(of_target, of_source), rtol=0, atol=1e-5 * matrix.max())


@pytest.mark.parametrize("source", ["similarity", *METHODS])
@pytest.mark.parametrize("recipe", ["hmm", "paper", "softmax", "itermax"])
def test_batches_and_padding_change_nothing(source: str, recipe: str) -> None:
    model, pairs = bert(5), sentences(5)
    options: Any = {"source": source, "recipe": recipe, "head": None if source == "similarity" else "all"}
    together, alone = (
        aligner(model, 1, **options, max_tokens=size).align(*zip(*pairs, strict=True)) for size in (500, 1)
    )
    assert together == alone


def test_a_lexicon_and_probabilities() -> None:
    model, pairs = bert(6), sentences(6)
    sides = cast(Any, list(zip(*pairs, strict=True)))
    scored = aligner(model, 0, count_text=True).align_scored(*sides)
    assert all(one.corpus_statistics and one.all_probabilities().max() <= 1 for one in scored)
    assert [one.links for one in scored] != aligner(model, 0).align(*sides)
    assert not aligner(model, 0, recipe="softmax").scored


@pytest.mark.parametrize("name", ["NLLB", "M2M100", "T5", "mBART-50"])
def test_encoders_of_translation_models(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    wrapped = HuggingFaceTokenizer(made := family.tokenizer(tmp_path), **family.options)
    model = random_model(family, made, seed=2).double()
    [links, *_] = EncoderAligner(model, wrapped, 0, recipe="argmax").align(*zip(*PAIRS, strict=True))
    source, target = wrapped.encode_source([PAIRS[0][0]])[0], wrapped.encode_target([PAIRS[0][1]])[0]
    with torch.no_grad():
        outputs = [
            encoder_of(model)(torch.tensor([side.ids]), output_hidden_states=True).hidden_states[1][0]
            for side in (source, target)
        ]
    kept = [[place for place, index in enumerate(side.word_ids) if index is not None] for side in (source, target)]
    linked = best_of_both(cosines(*(output.numpy()[places] for output, places in zip(outputs, kept, strict=True))))
    expected = ((source.word_ids[kept[0][i]], target.word_ids[kept[1][j]]) for i, j in np.argwhere(linked))
    assert links == Alignment(cast(Any, expected))


def test_models_with_heads_and_of_sentences(tmp_path: Path) -> None:
    pairs = sentences(8)
    sides = cast(Any, list(zip(*pairs, strict=True)))
    headed = bert(8, "BertForMaskedLM")
    expected = aligner(headed.bert, 1).align(*sides)
    assert aligner(headed, 1).align(*sides) == expected
    headed.bert.float().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    whole = SentenceTransformer(str(tmp_path), device="cpu")
    assert aligner(whole.double(), 1).align(*sides) == aligner(headed.bert.double(), 1).align(*sides)


def test_what_is_too_long_is_refused_alone() -> None:
    long = [SYLLABLES[0]] * 25
    pairs = [(long, long), (["ba"], ["da"]), (["ba"] * 39, ["da"])]
    model = bert(9)
    apart = aligner(model, 0).align_pairs(pairs)
    assert isinstance(apart[0], Alignment)
    assert (
        str(apart[2])
        == "got a source side of 41 pieces, expected at most 40, the number of positions that the model has"
    )
    joined = aligner(model, 0, "norm", head=0).align_pairs(pairs)
    most = "expected at most 40, the number of positions that the model has"
    assert str(joined[0]) == f"got 53 pieces on both sides together, {most}"
    assert joined[1] == apart[1] == Alignment([(0, 0)])


def test_robertas_positions_start_behind_padding() -> None:
    config = hf.XLMRobertaConfig(vocab_size=len(VOCABULARY), pad_token_id=1, max_position_embeddings=12, **SIZES)
    model = randomized(lambda: hf.XLMRobertaModel(config), 0, torch.float64)
    [kept, refused] = aligner(model, 0).align_pairs([(["ba"] * 8, ["da"]), (["ba"] * 9, ["da"])])
    assert isinstance(kept, Alignment)
    assert "expected at most 10" in str(refused)


def gpt2() -> Any:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=len(VOCABULARY), n_embd=8, n_layer=1, n_head=2, pad_token_id=0)
    ).train(False)


def two_vocabularies() -> Any:
    layers: Any = {f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = hf.MarianConfig(vocab_size=40, d_model=8, pad_token_id=0, share_encoder_decoder_embeddings=False, **layers)
    return hf.MarianMTModel(config)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: aligner(gpt2()), "got a GPT2Model, which reads one way only; expected an encoder"),
        (lambda: aligner(torch.nn.Linear(1, 1)), "got a Linear; expected an encoder of Hugging Face"),
        (
            lambda: EncoderAligner(bert(0), cast(Any, tokenizer())),
            r"got a BertTokenizer; wrap it: HuggingFaceTokenizer\(",
        ),
        (lambda: aligner(bert(0), source="norms"), "got source='norms'; expected one of similarity, embeddings, norm"),
        (
            lambda: aligner(two_vocabularies(), source="embeddings"),
            "got a MarianMTModel with a vocabulary for each language",
        ),
        (lambda: aligner(bert(0), head=0), "got layer='auto' and head=0; similarities are of whole layers"),
        (lambda: aligner(bert(0), "highest-norm"), "got layer='highest-norm' and head=None; similarities are of whole"),
        (lambda: aligner(bert(0), recipe="itermax", lexicon=Lexicon()), "got a lexicon and a recipe .* or of pieces"),
        (lambda: aligner(bert(0), 3).align([["ba"]], [["da"]]), "got layer 3; the model has 3: 0 to 2"),
        (
            lambda: WordAligner(bert(0), HuggingFaceTokenizer(tokenizer()), recipe="softmax"),
            "got a recipe of pieces; exp",
        ),
    ],
)
def test_what_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        make()


def test_a_slow_tokenizer_joins_nothing(tmp_path: Path) -> None:
    family = FAMILIES["M2M100"]
    wrapped = HuggingFaceTokenizer(made := family.tokenizer(tmp_path), **family.options)
    with pytest.raises(InvalidInputError, match="got the slow M2M100Tokenizer, expected a fast one to join sides"):
        EncoderAligner(random_model(family, made, seed=1), wrapped, 0, "norm").align(*zip(*PAIRS, strict=True))


def test_the_model_is_left_as_it_was() -> None:
    model = bert(1).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    aligned = aligner(model, 0, recipe=RECIPES["product"])
    aligned.align([["ba", "da"]], [["da"]])
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    model(torch.tensor([[2, 7]]), output_hidden_states=True)  # transformers' own hooks, which stay
    aligned.align([["ba", "da"]], [["da"]])
    assert len(model(torch.tensor([[2, 7]]), output_hidden_states=True).hidden_states) == 4


def read_alone(model: Any, layer: int, pairs: Pairs) -> list[Alignment]:
    """SimAlign's links, by states of one sentence at a time."""
    linked = [best_of_both(cosines(*(states(model, words, layer) for words in pair))) for pair in pairs]
    of_words = [[pieces_of(words) for words in pair] for pair in pairs]
    return [
        Alignment((source[i], target[j]) for i, j in np.argwhere(matrix).tolist())
        for matrix, (source, target) in zip(linked, of_words, strict=True)
    ]


@pytest.mark.parametrize("layer", [0, 1])
def test_layers_behind_the_one_that_is_read_do_not_run(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pairs = bert(2), sentences(2)
    expected, aligned = read_alone(model, layer, pairs), aligner(model, layer, recipe="argmax")
    monkeypatch.setattr(model.encoder.layer[1 + layer], "forward", None)
    assert aligned.align(*zip(*pairs, strict=True)) == expected


@pytest.mark.parametrize("layer", range(3))
def test_one_module_may_be_every_layer(layer: int) -> None:
    settings = hf.AlbertConfig(vocab_size=len(VOCABULARY), embedding_size=16, **SIZES)
    model, pairs = randomized(lambda: hf.AlbertModel(settings), 3, torch.float64), sentences(3)
    found = aligner(model, layer, recipe="argmax").align(*zip(*pairs, strict=True))
    assert found == read_alone(model, layer, pairs)
