"""Word maps by hand, and against pairs read one by one and merged entry by entry."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import alignment.gradients
from alignment.gradients import GradientKind, gradient_maps
from alignment.huggingface import HuggingFaceTokenizer
from alignment.selection import Setting
from alignment.teacher_forcing import TeacherForcedBatch, attention_maps, word_maps
from alignment.tokenization import TranslationTokenizer
from captum_norm import AttentionWeights, AttributionMaps, InvalidInputError, NormAttribution, NormMeter
from tests.alignment.toy import PAIRS, ToyMethod, ToyModel, ToyTokenizer
from tests.alignment.translation_models import FAMILIES, SOURCES, TARGETS, random_model
from tests.versions import older

BOTH: tuple[Setting, ...] = ("AWO", "AWI")


def places(batch: TeacherForcedBatch) -> Tensor:
    """1000 · row + column + 1: each entry says where it was."""
    rows, columns = batch.labels.shape[1], batch.inputs["src_tokens"].shape[1]
    single = 1000.0 * torch.arange(rows)[:, None] + torch.arange(columns) + 1
    return single.expand(len(batch.indices), -1, -1)


def test_rows_and_columns_by_hand() -> None:
    # Source rows: code a b c </s> are columns 0 to 4; target: step 1 emits x, 2 y, 3 z; step 2 reads x, 3 y, 4 z.
    pairs = [(["a|b", "c"], ["x", "y|z"])]
    [(index, maps)] = word_maps(ToyModel(), ToyTokenizer(), pairs, places, settings=BOTH)
    assert index == 0

    def row(step: float) -> list[float]:
        return [2000 * step + 2 + 3, 1000 * step + 4, 2000 * step + 1 + 5]

    assert maps["AWO"].tolist() == [row(1), row(2.5)]
    assert maps["AWI"].tolist() == [row(2), row(3.5)]


def test_words_without_pieces_have_nothing() -> None:
    [(_, maps)] = word_maps(ToyModel(), ToyTokenizer(), [(["~", "a"], ["x", "~", "y"])], places, settings=BOTH)
    for setting, steps in (("AWO", (1, 2)), ("AWI", (2, 3))):
        first, nothing, last = maps[cast(Setting, setting)].tolist()
        assert nothing == [0, 0, 0]
        assert [first, last] == [[0, 1000 * step + 2, 2000 * step + 1 + 3] for step in steps]


@pytest.mark.parametrize("max_tokens", [1, 25, 4096])
def test_a_batch_gives_what_each_pair_alone_gives(max_tokens: int) -> None:
    found = dict(word_maps(ToyModel(), ToyTokenizer(), PAIRS, places, settings=BOTH, max_tokens=max_tokens))
    assert sorted(found) == [0, 1, 2, 3]
    for index, pair in enumerate(PAIRS):
        [(_, alone)] = word_maps(ToyModel(), ToyTokenizer(), [pair], places, settings=BOTH)
        for setting in BOTH:
            assert found[index][setting].shape == (len(pair[1]), len(pair[0]) + 1)
            np.testing.assert_array_equal(found[index][setting], alone[setting])


def test_further_axes_and_half_precision() -> None:
    def stacked(batch: TeacherForcedBatch) -> Tensor:
        rows, columns = batch.labels.shape[1], batch.inputs["src_tokens"].shape[1]
        layers, heads = torch.arange(1, 4).view(1, 3, 1, 1, 1), torch.arange(1, 3).view(1, 1, 2, 1, 1)
        return (layers * 10 + heads).expand(len(batch.indices), 3, 2, rows, columns).to(torch.bfloat16)

    pairs = [(["a|b", "c"], ["x", "y|z"]), (["d"], ["u|v"])]
    for index, maps in word_maps(ToyModel(), ToyTokenizer(), pairs, stacked):
        sources = [3, 1][index]
        expected = np.array([[10 * layer + head for head in (1, 2)] for layer in (1, 2, 3)])
        assert maps["AWI"].dtype == np.float32
        # The null column has the code and </s>.
        np.testing.assert_array_equal(maps["AWI"][..., 0, -1], 2 * expected)
        np.testing.assert_array_equal(maps["AWI"][..., 0, :-1].sum(-1), sources * expected)


def test_attention_maps_ask_for_layers_and_heads() -> None:
    method = ToyMethod(lambda layer, head, read, source: 100.0 * layer + 10 * head + 0 * (read + source))
    for layers, per_head, expected in (
        (None, False, [10, 210, 410]),
        ([-1, 0], False, [410, 10]),
        ([1], True, [[100, 110]]),
    ):
        [(_, maps)] = word_maps(
            ToyModel(), ToyTokenizer(), [(["a"], ["x"])], attention_maps(method, layers=layers, per_head=per_head)
        )
        assert method.asked[-1] == (layers, per_head)
        assert maps["AWI"][..., 0, 0].tolist() == expected


def test_methods_without_cross_attention_are_refused() -> None:
    class SelfAttention(ToyMethod):
        def maps(self, *arguments: Any, **options: Any) -> AttributionMaps:
            maps = super().maps(*arguments, **options)
            return AttributionMaps(maps.cross, None, None, None, None, maps.real)

    method = SelfAttention(lambda *ids: (ids[2] + ids[3]).float())
    with pytest.raises(InvalidInputError, match="got a model without cross-attention; give an encoder–decoder model"):
        list(word_maps(ToyModel(), ToyTokenizer(), PAIRS, attention_maps(method)))


@pytest.mark.parametrize("kind", get_args(GradientKind))
def test_gradients_lose_their_sign(kind: GradientKind, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def signed(model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, *, kind: str) -> Tensor:
        asked.append((model, labels.shape, kind))
        signs = torch.tensor([1.0, -1.0]).repeat(labels.shape[1])[: labels.shape[1]]
        return signs[:, None] * inputs["src_tokens"][:, None, :]

    monkeypatch.setattr(alignment.gradients, "source_gradients", signed)
    model = ToyModel()
    [(_, maps)] = word_maps(model, ToyTokenizer(), [(["a|b"], ["x", "y|z"])], gradient_maps(model, kind), settings=BOTH)
    assert asked == [(model, (1, 5), kind)]
    for setting in BOTH:
        assert maps[setting].tolist() == [[[ord("a") + ord("b"), 3 + 2]] * 2]


# Against real models.


def merged(
    piece_map: NDArray[np.float64], rows: Sequence[int | None], columns: Sequence[int | None], pair: Any
) -> NDArray[np.float64]:
    """(T, S + 1): the mean over a target word's rows of the sum over a source word's columns, in float64."""
    sources, targets = pair
    result = np.zeros((len(targets), len(sources) + 1))
    for word in range(len(targets)):
        own = [step for step, owner in enumerate(rows) if owner == word]
        for step in own:
            for piece, owner in enumerate(columns):
                result[word, len(sources) if owner is None else owner] += piece_map[step, piece] / len(own)
    return result


def read_alone(model: Any, start: int, tokenizer: TranslationTokenizer, pair: Any, accumulate: Any) -> Any:
    """Norms, weights and head norms of one pair without padding, (L, [H,] T, S), and whose rows and columns are."""
    [source], [target] = tokenizer.encode_source([pair[0]]), tokenizer.encode_target([pair[1]])
    inputs = {
        "input_ids": torch.tensor([source.ids]),
        "decoder_input_ids": torch.tensor([[start, *target.ids[:-1]]]),
        "use_cache": False,
    }
    meter = NormMeter(model, accumulate=accumulate)
    cross = meter.measure(inputs, scopes=["attn"], weights=True, per_head=True, head_norms=True)["cross"]
    rows = {"AWO": target.word_ids, "AWI": [None, *target.word_ids[:-1]]}
    numbers = (cross.norms["attn"], cross.weights, cross.head_norms)
    return *(cast(Tensor, number)[0].double().numpy() for number in numbers), rows, source.word_ids


def assert_word_maps(found: Any, expected: Any, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * expected.max()


# With a prefix on the source, codes on both sides, a special token before the target, and a model that is its own base.
@pytest.fixture(scope="module", params=["Marian, several languages", "M2M100", "BART", "T5"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random model of a family, in float64, and its tokenizer."""
    family = FAMILIES[request.param]
    tokenizer = family.tokenizer(tmp_path_factory.mktemp("tokenizer"))
    torch.manual_seed(0)  # what the model is made with, before it is made more random
    return SimpleNamespace(
        model=random_model(family, tokenizer, seed=len(request.param)).double(),
        start=tokenizer.convert_tokens_to_ids(family.start),
        tokenizer=HuggingFaceTokenizer(tokenizer, **family.options),
        pairs=[(source.split(), target.split()) for source, target in zip(SOURCES, TARGETS, strict=True)],
    )


@pytest.mark.few
@pytest.mark.parametrize("max_tokens", [60, 4096])
def test_norms_and_weights_of_random_models(made: Any, max_tokens: int) -> None:
    def read(method: Any, **options: Any) -> dict[int, Any]:
        maps = attention_maps(method, **options)
        return dict(word_maps(made.model, made.tokenizer, made.pairs, maps, settings=BOTH, max_tokens=max_tokens))

    norms, weights = read(NormAttribution(made.model)), read(AttentionWeights(made.model), layers=[-1], per_head=True)
    head_norms = read(NormAttribution(made.model.base_model), layers=[1, 0], per_head=True)
    for index, pair in enumerate(made.pairs):
        summed, alphas, per_head, rows, columns = read_alone(
            made.model, made.start, made.tokenizer, pair, torch.float64
        )
        assert sum(owner is None for owner in columns) >= 1
        for setting in BOTH:
            for found, piece_maps in (
                (norms[index][setting], summed),
                (weights[index][setting], alphas[[-1]]),
                (head_norms[index][setting], per_head[[1, 0]]),
            ):
                expected = [
                    merged(piece_map, rows[setting], columns, pair)
                    for piece_map in piece_maps.reshape(-1, *piece_maps.shape[-2:])
                ]
                shape = (*piece_maps.shape[:-2], len(pair[1]), len(pair[0]) + 1)
                # The maps are handed on in float32; before transformers 5.15, T5's softmax was in it.
                assert_word_maps(found, np.reshape(expected, shape), 2e-6 if older("5.15") else 2e-7)
