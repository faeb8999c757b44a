"""Runs translation models on given targets (teacher forcing), and merges their maps over pieces into word maps."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from alignment.selection import Setting, row_word_ids
from alignment.tokenization import EncodedSentence, TranslationTokenizer
from captum_norm import AttributionMaps, InvalidInputError, UnsupportedModelError
from captum_norm.models import explained_module, input_device

OnError = Callable[[int, InvalidInputError], None]
"""Called with the index of an unusable pair and the reason."""

MOST_PIECES = 2048
"""The most pieces of a side for a model whose positions have no end."""

_PIECE_LETTERS = 16  # the longest piece that SentencePiece learns, unless told otherwise

NO_LABEL = -100
"""The label at padding."""


@dataclass(frozen=True, slots=True, eq=False)
class TeacherForcedBatch:
    """A batch of B sentence pairs, with up to S source and T target pieces.

    Decoder step t emits ``labels[:, t]`` and reads the label before it; step 0 reads the start token or the language
    code. Padding is on the right, so position t of a sentence is position t of its row.
    """

    inputs: dict[str, Any]
    """The arguments of the model's forward function: tensors (B, S) and (B, T), and flags."""
    labels: Tensor
    """(B, T), what each decoder step emits, -100 at padding."""
    source: list[EncodedSentence]
    target: list[EncodedSentence]
    indices: list[int]
    """The index of each pair."""


def teacher_forced_batches(
    model: nn.Module,
    tokenizer: TranslationTokenizer,
    pairs: Sequence[tuple[Sequence[str], Sequence[str]]],
    *,
    max_tokens: int = 4096,
    on_error: OnError | None = None,
) -> Iterator[TeacherForcedBatch]:
    """Group pairs of similar length into batches on the device of the model's inputs, the longest first.

    All pairs are tokenised at once, but batches are built one at a time: pass a large corpus in parts.

    Args:
        model: a Hugging Face or fairseq sequence-to-sequence model.
        tokenizer: its tokenizer.
        pairs: the source words and the target words of each pair.
        max_tokens: the largest batch, B · (S + T), padding included. A pair that exceeds it is a batch of its own.
        on_error: called for each unusable pair, which is then left out; None raises the error instead.

    Raises:
        InvalidInputError: a side of a pair has no word, is too long for the model, or its pieces cannot be attributed
            to its words; or ``max_tokens`` is less than 1.
        UnsupportedModelError: the forward function is neither Hugging Face's nor fairseq's.
    """
    if max_tokens < 1:
        raise InvalidInputError(f"got max_tokens={max_tokens}, expected at least 1")
    model = explained_module(model)
    family = _family(model)
    report = _raise if on_error is None else on_error
    usable = encoded_pairs(tokenizer, pairs, family.limits(model), report)
    lengths = {index: (len(source.ids), len(target.ids)) for index, (source, target) in usable.items()}
    return (_batch(model, family, usable, indices) for indices in buckets(lengths, max_tokens))


_EncodedPair = tuple[EncodedSentence, EncodedSentence]
_Encode = Callable[[Sequence[Sequence[str]]], list[EncodedSentence]]


def encoded_pairs(
    tokenizer: TranslationTokenizer,
    pairs: Sequence[tuple[Sequence[str], Sequence[str]]],
    limits: tuple[int | None, int | None],
    report: OnError,
) -> dict[int, _EncodedPair]:
    """Encode the pairs that can be used, by their index; report the others."""
    first = {index: source for index, (source, _) in enumerate(pairs)}
    sources = _encoded_side("source", tokenizer.encode_source, first, limits[0], report)
    second = {index: pairs[index][1] for index in sources}
    targets = _encoded_side("target", tokenizer.encode_target, second, limits[1], report)
    return {index: (sources[index], target) for index, target in targets.items()}


def _encoded_side(
    side: str, encode: _Encode, sentences: Mapping[int, Sequence[str]], limit: int | None, report: OnError
) -> dict[int, EncodedSentence]:
    """Encode the sentences of a side that have words, and no more pieces than the model has positions."""
    most = limit or MOST_PIECES
    short: dict[int, Sequence[str]] = {}
    for index, words in sentences.items():
        letters = sum(map(len, words))
        if letters <= _PIECE_LETTERS * most:  # some tokenizers take time by the square of a word's length
            short[index] = words
        else:
            message = f"got a {side} side of {letters} letters, expected at most {_PIECE_LETTERS * most}"
            report(index, InvalidInputError(message))
    usable: dict[int, EncodedSentence] = {}
    for index, sentence in _encoded(encode, short, report).items():
        if all(word is None for word in sentence.word_ids):
            message = f"got a {side} side without a word, expected at least one that the tokenizer keeps"
            report(index, InvalidInputError(message))
        elif len(sentence.ids) > most:
            message = f"got a {side} side of {len(sentence.ids)} pieces, expected at most {most}"
            reason = "" if limit is None else ", the number of positions that the model has"
            report(index, InvalidInputError(f"{message}{reason}"))
        else:
            usable[index] = sentence
    return usable


def _raise(index: int, error: InvalidInputError) -> None:
    raise InvalidInputError(f"pair {index}: {error}") from error


def _encoded(encode: _Encode, sentences: Mapping[int, Sequence[str]], on_error: OnError) -> dict[int, EncodedSentence]:
    """Encode all sentences at once; on failure each half on its own, to find the sentences at fault."""
    indices = list(sentences)
    try:
        return dict(zip(indices, encode(list(sentences.values())), strict=True))
    except InvalidInputError as error:
        if len(indices) == 1:
            on_error(indices[0], error)
            return {}
    halves = indices[: len(indices) // 2], indices[len(indices) // 2 :]
    first, second = (_encoded(encode, {index: sentences[index] for index in half}, on_error) for half in halves)
    return first | second


def buckets(lengths: Mapping[int, tuple[int, int]], max_tokens: int) -> Iterator[list[int]]:
    """Group the indices of pairs by their (source, target) lengths."""
    bucket: list[int] = []
    widest = 0, 0
    # By the longer side, then by the target: the least padding among the orders tried on 200 to 100,000 Europarl pairs.
    for index in sorted(lengths, key=lambda index: (max(lengths[index]), lengths[index][1]), reverse=True):
        source, target = lengths[index]
        wider = max(widest[0], source), max(widest[1], target)
        if bucket and sum(wider) * (len(bucket) + 1) > max_tokens:
            yield bucket
            bucket, wider = [], (source, target)
        bucket.append(index)
        widest = wider
    if bucket:
        yield bucket


def _batch(
    model: nn.Module, family: "_Family", encoded: Mapping[int, _EncodedPair], indices: list[int]
) -> TeacherForcedBatch:
    source, target = [encoded[index][0] for index in indices], [encoded[index][1] for index in indices]
    labels = _padded((sentence.ids for sentence in target), NO_LABEL)
    inputs = family.inputs(model, [sentence.ids for sentence in source], labels)
    device = input_device(model)
    on_device = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return TeacherForcedBatch(on_device, labels.to(device), source, target, indices)


def _padded(rows: Iterable[Sequence[int]], fill: int) -> Tensor:
    """(rows, longest row), padded on the right."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=fill)


def _shifted(labels: Tensor, start: int, padding: int) -> Tensor:
    """The decoder's input: the start token and all labels but the last."""
    read = labels.roll(1, dims=1)
    read[:, 0] = start
    return read.masked_fill(labels == NO_LABEL, padding)


class _Family(NamedTuple):
    """Models with the same forward arguments: these, their values, and the numbers of source and target positions."""

    parameters: tuple[str, ...]
    inputs: Callable[[Any, list[list[int]], Tensor], dict[str, Any]]
    limits: Callable[[Any], tuple[int | None, int | None]]


def _huggingface_inputs(model: Any, source: list[list[int]], labels: Tensor) -> dict[str, Any]:
    inputs = encoder_inputs(model, source)
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is None:  # as for M2M100
        read = _shifted(labels, _token_id(model, "decoder_start_token_id"), _token_id(model, "pad_token_id"))
    else:
        read = prepare(labels.clone())  # FSMT writes into its argument
    return {
        **inputs,
        "decoder_input_ids": read,
        "decoder_attention_mask": (labels != NO_LABEL).long(),
        "use_cache": False,  # with a cache, FSMT's decoder drops its causal mask
    }


def encoder_inputs(model: nn.Module, rows: list[list[int]]) -> dict[str, Tensor]:
    """The padded ids of sentences, and a mask."""
    ids = _padded(rows, _token_id(model, "pad_token_id"))
    return {"input_ids": ids, "attention_mask": _padded(([1] * len(row) for row in rows), 0)}


def _token_id(model: Any, name: str) -> int:
    index: int | None = getattr(model.config, name, None)
    if index is None:
        raise InvalidInputError(f"got a {type(model).__name__} without {name}; set model.config.{name}")
    return index


def _huggingface_limits(model: Any) -> tuple[int | None, int | None]:
    # Beyond it, a table of positions ends or grows, which would change the model. T5's positions are relative.
    longest = getattr(model.config, "max_position_embeddings", None)
    return longest, longest


_FAIRSEQ_PAD, _FAIRSEQ_END = 1, 2  # in every dictionary of fairseq


def _fairseq_inputs(_: Any, source: list[list[int]], labels: Tensor) -> dict[str, Any]:
    # fairseq pads sources on the left, but counts positions from the first real piece, so either side works.
    return {
        "src_tokens": _padded(source, _FAIRSEQ_PAD),
        "src_lengths": torch.tensor([len(row) for row in source]),
        "prev_output_tokens": _shifted(labels, _FAIRSEQ_END, _FAIRSEQ_PAD),
    }


_FAMILIES = (
    _Family(("input_ids", "attention_mask", "decoder_input_ids"), _huggingface_inputs, _huggingface_limits),
    _Family(("src_tokens", "src_lengths", "prev_output_tokens"), _fairseq_inputs, lambda model: model.max_positions()),
)


def _family(model: nn.Module) -> _Family:
    taken = inspect.signature(model.forward).parameters
    for family in _FAMILIES:
        if set(family.parameters) <= set(taken):
            return family
    expected = " or ".join(", ".join(family.parameters) for family in _FAMILIES)
    raise UnsupportedModelError(
        f"the forward function of {type(model).__name__} takes {', '.join(taken) or 'nothing'}, expected {expected}; "
        "give a sequence-to-sequence model of Hugging Face or fairseq"
    )


PieceMaps = Callable[[TeacherForcedBatch], Tensor]
"""Computes the maps of a batch, (B, ..., T, V + S): a row per decoder step, a column per source piece.

Before these may be V columns of the virtual tokens of a tuned prompt.
"""

WordMaps = dict[Setting, NDArray[np.float32]]
"""The word maps of one sentence pair by setting, (..., T words, S words + 1), null column last."""


class MapMethod(Protocol):
    """A method of ``captum_norm``."""

    def maps(
        self, inputs: Any, *, layers: Sequence[int] | None, per_head: bool, stacks: Collection[Any] | None
    ) -> AttributionMaps:
        """The maps of every layer."""
        ...


def attention_maps(method: MapMethod, *, layers: Sequence[int] | None = None, per_head: bool = False) -> PieceMaps:
    """Piece maps from a method of ``captum_norm``: cross-attention of some or all layers, (B, L, [H,] T, V + S)."""

    def maps(batch: TeacherForcedBatch) -> Tensor:
        cross = method.maps(batch.inputs, layers=layers, per_head=per_head, stacks=["cross"]).cross
        if cross is None:
            raise InvalidInputError("got a model without cross-attention; give an encoder–decoder model")
        return cross

    return maps


def word_maps(
    model: nn.Module,
    tokenizer: TranslationTokenizer,
    pairs: Sequence[tuple[Sequence[str], Sequence[str]]],
    piece_maps: PieceMaps,
    *,
    settings: Sequence[Setting] = ("AWI",),
    max_tokens: int = 4096,
    on_error: OnError | None = None,
) -> Iterator[tuple[int, WordMaps]]:
    """Compute the word maps of sentence pairs, in no particular order.

    Entries are summed over the pieces of a source word and averaged over those of a target word [Kobayashi et al.
    2020]; the source's special tokens and virtual tokens make up the null column.

    Args:
        model: the translation model; left unchanged.
        tokenizer: its tokenizer.
        pairs: the source words and the target words of each pair.
        piece_maps: the method, such as ``attention_maps(NormAttribution(model))``.
        settings: which rows to read: ``"AWO"``, ``"AWI"`` or both.
        max_tokens: as for :func:`teacher_forced_batches`, which names the errors.
        on_error: likewise.

    Yields:
        The pair's index and its maps by setting.
    """
    for batch in teacher_forced_batches(model, tokenizer, pairs, max_tokens=max_tokens, on_error=on_error):
        maps = piece_maps(batch)
        sizes = [(len(pairs[index][1]), len(pairs[index][0])) for index in batch.indices]
        virtual = [None] * (maps.shape[-1] - max(len(sentence.ids) for sentence in batch.source))
        columns = [[*virtual, *sentence.word_ids] for sentence in batch.source]
        rows = {setting: [row_word_ids(sentence, setting) for sentence in batch.target] for setting in settings}
        merged = {setting: merged_pieces(maps, of_rows, columns, sizes) for setting, of_rows in rows.items()}
        for row, (index, (targets, sources)) in enumerate(zip(batch.indices, sizes, strict=True)):
            yield index, {setting: words[row, ..., :targets, : sources + 1] for setting, words in merged.items()}


WordIds = Sequence[Sequence[int | None]]


def merged_pieces(
    maps: Tensor, rows: WordIds, columns: WordIds, sizes: Sequence[tuple[int, int]]
) -> NDArray[np.float32]:
    """(B, ..., pieces, pieces), their words, how many -> (B, ..., most words, most words + 1), null last."""
    batch_size, *middle, steps, pieces = maps.shape
    target = _membership(rows, [targets for targets, _ in sizes], steps, null=False)
    source = _membership(columns, [sources for _, sources in sizes], pieces, null=True)
    target = target / target.sum(1, keepdim=True).clamp(min=1)
    flat = maps.reshape(batch_size, -1, steps, pieces).float().cpu()
    merged = target.transpose(1, 2).unsqueeze(1) @ flat @ source.unsqueeze(1)
    numbers: NDArray[np.float32] = merged.reshape(batch_size, *middle, *merged.shape[2:]).numpy()
    return numbers


def _membership(word_ids: WordIds, counts: Sequence[int], pieces: int, *, null: bool) -> Tensor:
    """(B, pieces, words): 1 where a piece is of a word; with ``null``, pieces of no word are in the last column."""
    members = torch.zeros(len(word_ids), pieces, max(counts) + null)
    places = [
        (row, piece, count if index is None else index)
        for row, (ids, count) in enumerate(zip(word_ids, counts, strict=True))
        for piece, index in enumerate(ids)
        if null or index is not None
    ]
    members[tuple(torch.tensor(places).T)] = 1.0
    return members
