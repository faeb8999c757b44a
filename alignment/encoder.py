"""Aligns words with an encoder: by similarities of its states, or by its attribution maps of both sides joined."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence

from alignment import teacher_forcing
from alignment.aligner import Layer, Pairs, WordAligner, head_map, without_head
from alignment.decoding import probable_links
from alignment.huggingface import HuggingFaceTokenizer
from alignment.lexicon import Lexicon
from alignment.links import ScoredAlignment
from alignment.recipes import DEFAULT_RECIPE, Recipe
from alignment.selection import Setting
from alignment.teacher_forcing import MapMethod, OnError, WordIds, WordMaps
from alignment.tokenization import EncodedSentence, TranslationTokenizer
from alignment.word_maps import WordMap, normalize_rows
from captum_norm import InvalidInputError, UnsupportedModelError
from captum_norm.checks import check_choice
from captum_norm.methods import METHODS
from captum_norm.models import evaluating, explained_module, input_device, longest_sequence

_CPU_TOKENS = 512  # pieces of a batch on a CPU; more leave its caches, and need more padding

SOURCES = ("similarity", "embeddings", "norm", "alti", "value-zeroing", "weights")
"""What :class:`alignment.EncoderAligner` makes maps of, by name."""


class EncoderAligner(WordAligner):
    """Word alignments from an encoder that knows both languages, such as mBERT, XLM-R, LaBSE or that of NLLB.

    ``"similarity"`` runs both sides apart: a piece's row is the softmax of the dot products of its state and those of
    the other side's pieces [Dou & Neubig 2021]. ``"embeddings"`` does so with the input embeddings, one layer: the
    products are their cosines times the square root of the width, as of queries and keys of unit variance. Both read
    translation models with one vocabulary for both languages, too. Other sources run both sides joined, as the
    tokenizer joins two texts, ``[CLS] source [SEP] target [SEP]``: a piece's row is what it takes from the other side's
    pieces.

    So there are rows of target pieces and rows of source pieces. Where recipes speak of settings, the former are AWI,
    the latter AWO, here of the same layer and head. Pieces become words as for :class:`alignment.WordAligner`; special
    tokens of joined sides make up the null column.

    Recipes of pieces (:data:`alignment.recipes.PIECE_RECIPES`) come before words. Those that combine nothing, as
    ``argmax`` and ``itermax``, read cosines, moved to 0 … 1, in place of softmaxes [Jalili Sabet et al. 2020].

    Args:
        model: a Hugging Face encoder or encoder–decoder model, with or without its head, or a SentenceTransformer; left
            unchanged.
        tokenizer: its tokenizer, ``HuggingFaceTokenizer(tokenizer)`` or that of a fairseq checkpoint; that of the
            direction from source to target.
        layer: as for :class:`alignment.WordAligner`. Layer 0 is the first: layer 7 is SimAlign's and awesome-align's 8.
        source: a name in :data:`alignment.encoder.SOURCES`, or a method made for :func:`alignment.encoder.encoder_of`.
        head: as for :class:`alignment.WordAligner`, of joined sides; max_tokens, lexicon and count_text are, too.
        recipe: likewise, or a name in :data:`alignment.recipes.PIECE_RECIPES`, whose links have no probabilities.

    Raises:
        InvalidInputError: the model reads one way only; an unknown source, recipe, layer or head; or a lexicon and a
            recipe of pieces or with a null column.

    Example:
        >>> from alignment import EncoderAligner, HuggingFaceTokenizer
        >>> from captum_norm.loading import load
        >>> model, tokenizer = load()  # an English one
        >>> aligner = EncoderAligner(model, HuggingFaceTokenizer(tokenizer), layer=0, recipe="itermax")
        >>> aligner.align([["a", "good", "small", "film"]], [["a", "small", "good", "movie"]])
        [Alignment([(0, 0), (1, 2), (2, 1), (3, 3)])]
    """

    _of_encoder = True

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TranslationTokenizer,
        layer: Layer = "auto",
        source: str | MapMethod = "similarity",
        *,
        head: int | Literal["auto", "all"] | None = None,
        recipe: Recipe | str = DEFAULT_RECIPE,
        max_tokens: int = 4096,
        lexicon: Lexicon | None = None,
        count_text: bool = False,
    ) -> None:
        similar = source in ("similarity", "embeddings")
        if not isinstance(tokenizer, HuggingFaceTokenizer) and not (similar and hasattr(tokenizer, "encode_source")):
            raise InvalidInputError(f"got a {type(tokenizer).__name__}; wrap it: HuggingFaceTokenizer(tokenizer)")
        encoder: Any = encoder_of(model)
        if source == "embeddings" or not isinstance(tokenizer, HuggingFaceTokenizer):
            _check_one_vocabulary(explained_module(model), encoder)
        method: Any = source
        if isinstance(source, str):
            check_choice("source", source, SOURCES)
            method = None if similar else METHODS[source].load()(encoder)
        if method is None and (head not in (None, "all") or layer == "highest-norm"):
            expected = 'similarities are of whole layers: give an index or "auto", and no head'
            raise InvalidInputError(f"got layer={layer!r} and head={head!r}; {expected}")
        options: Any = {"head": head, "recipe": recipe, "max_tokens": max_tokens, "lexicon": lexicon}
        super().__init__(encoder, tokenizer, method, layer, count_text=count_text, **options)
        self._embeddings: Any = encoder.get_input_embeddings() if source == "embeddings" else None
        self._ends = self._named_ends() if self._embeddings is None else {}
        if self._embeddings is None:
            self._refuse_one_way()

    def map_each(self, pairs: Pairs) -> Iterator[tuple[int, WordMap | InvalidInputError]]:
        """Yield each pair's index and map, or why the pair cannot be used.

        For a recipe of pieces, an entry is the highest one of the linked pieces of both words, 0 if there is none.
        """
        if not self.recipe.pieces or not pairs:
            yield from super().map_each(pairs)
            return
        choice = self.choose(pairs)
        refused: dict[int, InvalidInputError] = {}
        cosine = self.recipe.combination is None
        for indices, word_ids, maps in self._piece_maps(pairs, [choice.layer], refused.__setitem__, cosine=cosine):
            numbers = maps[:, 0].to(torch.promote_types(maps.dtype, torch.float32)).cpu().numpy()
            for index, words, piece_map in zip(indices, word_ids, numbers, strict=True):
                yield index, self._of_linked_pieces(head_map(piece_map, choice.head), words, *map(len, pairs[index]))
        yield from refused.items()

    def read(self, word_map: WordMap, *pair: Any, **counts: Any) -> ScoredAlignment:
        """Read the links of a pair off its map; for a recipe of pieces, all entries."""
        if self.recipe.pieces:
            return ScoredAlignment(probable_links(word_map, 0.0, mutual=False))
        return super().read(word_map, *pair, **counts)

    def _of_linked_pieces(self, piece_map: WordMap, words: Sequence[int | None], sources: int, targets: int) -> WordMap:
        """(N, N) of pieces -> (targets, sources), the highest entries of linked pieces."""
        ids = np.array([-1 if index is None else index for index in words])
        source, target = np.flatnonzero((ids >= 0) & (ids < sources)), np.flatnonzero(ids >= sources)
        rows, columns = piece_map[np.ix_(target, source)], piece_map[np.ix_(source, target)]
        if self.method is not None:  # softmaxes have these sums already
            rows, columns = normalize_rows(rows, null=False), normalize_rows(columns, null=False)
        read: dict[Setting, WordMap] = {"AWI": _with_null(rows), "AWO": _with_null(columns.T)}
        matrix, word_map = self.recipe.word_map(read, "AWI"), np.zeros((targets, sources))
        for left, right in self.recipe.decode(matrix).links:
            place = ids[target[right]] - sources, ids[source[left]]
            word_map[place] = max(word_map[place], matrix[right, left])
        return _with_null(word_map) if self.recipe.null else word_map

    def _maps(
        self, pairs: Pairs, layers: Sequence[int] | None, settings: Sequence[Setting], on_error: OnError
    ) -> Iterator[tuple[int, WordMaps]]:
        for indices, word_ids, maps in self._piece_maps(pairs, layers, on_error):
            sizes = [(len(pairs[index][0]), sum(map(len, pairs[index]))) for index in indices]
            merged = teacher_forcing.merged_pieces(maps, word_ids, word_ids, [(count, count) for _, count in sizes])
            for index, (sources, count), words in zip(indices, sizes, merged, strict=True):
                rows = words[..., sources:count, [*range(sources), count]]
                columns = _with_null(np.swapaxes(words[..., :sources, sources:count], -1, -2))
                yield index, {setting: rows if setting == "AWI" else columns for setting in settings}

    def _piece_maps(
        self, pairs: Pairs, layers: Sequence[int] | None, on_error: OnError, *, cosine: bool = False
    ) -> Iterator[tuple[list[int], WordIds, Tensor]]:
        """Yield the indices of a batch, the words of both sides' pieces, the target's last, and (B, L, [H,] N, N)."""
        tables = longest_sequence(self.model), getattr(self.model.config, "max_position_embeddings", None)
        limit = min(filter(None, tables), default=None)
        tokenizer: Any = self.tokenizer
        usable = teacher_forcing.encoded_pairs(tokenizer, pairs, (limit, limit), on_error)
        if self.method is None:
            lengths = {index: (len(source.ids), len(target.ids)) for index, (source, target) in usable.items()}
            for indices in teacher_forcing.buckets(lengths, self._max_tokens):
                sides = [[usable[index][side] for index in indices] for side in (0, 1)]
                sources = [len(pairs[index][0]) for index in indices]
                states = self._states([*sides[0], *sides[1]], layers)
                word_ids = [
                    [*source.word_ids, *[None] * (states.shape[2] - len(source.ids)), *target.after(count).word_ids]
                    for source, target, count in zip(*sides, sources, strict=True)
                ]
                yield indices, word_ids, _similarities(torch.cat(states.chunk(2), 2), word_ids, sources, cosine=cosine)
            return
        apart = [(source, target.after(len(pairs[index][0]))) for index, (source, target) in usable.items()]
        joined: dict[int, EncodedSentence] = dict(zip(usable, tokenizer.joined(apart), strict=True))
        for index, sentence in list(joined.items()):
            if limit is not None and len(sentence.ids) > limit:
                message = f"got {len(sentence.ids)} pieces on both sides together, expected at most {limit}"
                on_error(index, InvalidInputError(f"{message}, the number of positions that the model has"))
                del joined[index]
        lengths = {index: (len(sentence.ids), 0) for index, sentence in joined.items()}
        for indices in teacher_forcing.buckets(lengths, self._max_tokens):
            inputs = self._inputs([joined[index] for index in indices])
            options: Any = {"layers": layers, "per_head": self._head is not None, "stacks": None}
            maps, length = self.method.maps(inputs, **options).encoder, inputs["input_ids"].shape[1]
            # Virtual tokens of a tuned prompt come before the inputs.
            yield indices, [joined[index].word_ids for index in indices], maps[..., -length:, -length:]

    def _states(self, sentences: Sequence[EncodedSentence], layers: Sequence[int] | None) -> Tensor:
        """The states behind some or all layers, (B, L, N, D), in float32 or better; of any value at padding."""
        lengths = {index: (len(sentence.ids), 0) for index, sentence in enumerate(sentences)}
        most = _CPU_TOKENS if input_device(self.model).type == "cpu" else self._max_tokens
        found: dict[int, Tensor] = {}
        with torch.no_grad(), evaluating(self.model), _without_traces(self.model):
            if layers and len(layers) == 1 and layers[0] in self._ends:
                self.model.get_submodule(self._ends[layers[0]]).register_forward_hook(_stop)
            for batch in teacher_forcing.buckets(lengths, most):
                inputs = self._inputs([sentences[index] for index in batch])
                states = self._run(inputs, layers)[:, -inputs["input_ids"].shape[1] :]
                found |= zip(batch, states.to(torch.promote_types(states.dtype, torch.float32)), strict=True)
        return pad_sequence([found[index] for index in sorted(found)], batch_first=True).transpose(1, 2)

    def _run(self, inputs: dict[str, Tensor], layers: Sequence[int] | None) -> Tensor:
        try:
            states = self._all_states(inputs)
        except _StopError as stopped:
            return stopped.args[0].unsqueeze(2)  # type: ignore[no-any-return]
        if not states:
            raise UnsupportedModelError(f"got a {type(self.model).__name__}, which returns no hidden states")
        count = len(states) - 1
        chosen = range(count) if layers is None else layers
        if outside := [layer for layer in chosen if not -count <= layer < count]:
            raise InvalidInputError(f"got layer {outside[0]}; the model has {count}: 0 to {count - 1}")
        return torch.stack([states[1:][layer] for layer in chosen], 2)

    def _all_states(self, inputs: dict[str, Tensor]) -> Sequence[Tensor] | None:
        """The states before and behind each layer, (B, N, D), or the scaled embeddings as those of one layer."""
        if self._embeddings is None:
            return getattr(self.model(**inputs, output_hidden_states=True), "hidden_states", None)
        vectors = normalize(self._embeddings(inputs["input_ids"]), dim=-1)
        return vectors, vectors * vectors.shape[-1] ** 0.25

    def _named_ends(self) -> dict[int, str]:
        """The module that returns each layer's states and nothing else; ALBERT's is called more than once."""
        outputs: dict[str, list[Any]] = {}
        with torch.no_grad(), evaluating(self.model), _without_traces(self.model):
            for name, module in self.model.named_modules():
                module.register_forward_hook(lambda *call, of=name: outputs.setdefault(of, []).append(call[-1]))
            inputs = self._inputs(self.tokenizer.encode_source([["a"]]))
            states = getattr(self.model(**inputs, output_hidden_states=True), "hidden_states", None) or [None]
        layers = {id(state): layer for layer, state in enumerate(states[1:])}
        alone = {name: id(output) for name, [output, *more] in outputs.items() if not more}
        return {layers[output]: name for name, output in alone.items() if output in layers}

    def _inputs(self, sentences: Sequence[EncodedSentence]) -> dict[str, Tensor]:
        inputs = teacher_forcing.encoder_inputs(self.model, [sentence.ids for sentence in sentences])
        if all(types := [sentence.types for sentence in sentences]):
            inputs["token_type_ids"] = pad_sequence(list(map(torch.tensor, types)), batch_first=True)
        return {name: value.to(input_device(self.model)) for name, value in inputs.items()}

    def _refuse_one_way(self) -> None:
        """Refuse a model whose states do not depend on what is behind them."""
        [sentence] = self.tokenizer.encode_source([["a", "a"]])
        *before, last = sentence.ids
        first, other = (
            self._states([EncodedSentence([*before, end], sentence.word_ids)], [-1])[:, :, :-1]
            for end in (last, last - 1 if last else 1)
        )
        if torch.equal(first, other):
            expected = "expected an encoder, such as mBERT, XLM-R or that of NLLB"
            raise InvalidInputError(f"got a {type(self.model).__name__}, which reads one way only; {expected}")


def encoder_of(model: nn.Module) -> nn.Module:
    """The encoder of a Hugging Face model or SentenceTransformer, without head and decoder."""
    module: Any = explained_module(model)
    if type(module).__name__ == "SentenceTransformer":
        module = explained_module(module[0].auto_model)
    encoder: Any = without_head(module)
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        encoder = encoder.get_encoder()
    if not hasattr(encoder, "config"):
        raise InvalidInputError(f"got a {type(encoder).__name__}; expected an encoder of Hugging Face")
    return encoder  # type: ignore[no-any-return]


def _check_one_vocabulary(model: Any, encoder: Any) -> None:
    """Refuse a translation model whose encoder has no embeddings of the target's pieces."""
    if model is not encoder and getattr(model.config, "is_encoder_decoder", False):
        source, target = (part.get_input_embeddings() for part in (encoder, model.get_decoder()))
        if source.weight is not target.weight:
            message = f"got a {type(model).__name__} with a vocabulary for each language"
            raise InvalidInputError(f"{message}; expected the same embeddings in encoder and decoder")


class _StopError(Exception):
    """Ends a forward pass behind the layer that is read, with its states."""


def _stop(*call: Any) -> None:
    raise _StopError(call[-1])


@contextmanager
def _without_traces(model: nn.Module) -> Iterator[None]:
    """Remove the hooks of a call, also those with which transformers collects states, and no worker can receive."""
    mark = "_output_capturing_hooks_installed"
    before = {module: (set(module._forward_hooks), mark in vars(module)) for module in model.modules()}
    try:
        yield
    finally:
        for module, (hooks, marked) in before.items():
            for number in module._forward_hooks.keys() - hooks:
                del module._forward_hooks[number]
            if not marked:
                vars(module).pop(mark, None)


def _with_null(maps: Any) -> Any:
    """Append a null column of zeros to maps (..., T, S)."""
    return np.concatenate([maps, np.zeros_like(maps[..., :1])], -1)


def _similarities(states: Tensor, word_ids: WordIds, sources: Sequence[int], *, cosine: bool) -> Tensor:
    """(B, L, N, D) -> (B, L, N, N): cosines, from 0 to 1, or softmaxes of dot products over the other side's pieces."""
    if cosine:
        states = normalize(states, dim=-1)
        return (states @ states.mT + 1) / 2
    sides = torch.full((len(states), states.shape[2]), 2)  # 0: source, 1: target, 2: neither
    for row, (words, count) in enumerate(zip(word_ids, sources, strict=True)):
        sides[row, : len(words)] = torch.tensor([2 if index is None else int(index >= count) for index in words])
    apart = (sides[:, :, None] + sides[:, None, :] != 1)[:, None].to(states.device)
    return (states @ states.mT).masked_fill(apart, -torch.inf).softmax(-1).masked_fill(apart, 0.0)
