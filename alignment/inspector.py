"""Inspects translations with a translation model: are they about their source?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from alignment.aligner import Pairs, WordAligner, Words, head_map, sentence_pairs
from alignment.inspection import (
    COVERED,
    DOUBT,
    Inspection,
    copied,
    coverage,
    flags_of,
    information,
    link_entropy,
    longest_run,
    repeated_words,
    shared_names,
    shared_numbers,
)
from alignment.links import calibrated
from alignment.recipes import RECIPES
from alignment.teacher_forcing import PieceMaps, TeacherForcedBatch, WordMaps, word_maps
from alignment.tokenization import TranslationTokenizer
from alignment.translation import batch_log_probabilities, emitted_steps, recorded_logits, target_log_probabilities
from captum_norm import InvalidInputError, NormMeter
from captum_norm.results.aggregation import encoder_decoder_rollout

NO_SOURCE = (".",)
"""What stands for no source."""

_RECIPE = RECIPES["hmm"]


class Inspector:
    """Measures whether translations match their source, with a model that translates the source.

    One teacher-forced pass over a pair gives the log-probabilities of the target's pieces, the norms in
    cross-attention, from which links are read by the recipe ``hmm``, and the source's share: that of all layers by
    ALTI+'s chain, with ‖c‖ / (‖c‖ + ‖r‖) for a layer's cross-attention, c the vector that it adds and r the residual
    stream. Pairs that are improbable or badly linked (:data:`alignment.inspection.DOUBT`) are passed through the model
    twice more, without their source and with their sides exchanged.

    Args:
        model: a sequence-to-sequence model with its language-modelling head; left unchanged.
        tokenizer: its tokenizer.
        layer: the layer of the links, as for :class:`WordAligner`.
        head: their head: an index, or ``"auto"`` to choose it with the layer.
        all_measures: whether to pass every pair through the model again, so that no measure is missing.
        max_tokens: the largest batch, in pieces of both sides, padding included.

    Raises:
        InvalidInputError: an unknown layer or head.

    Example:
        >>> from alignment import load_shipped_model
        >>> inspector = Inspector(*load_shipped_model("fr-en"), layer=0, head=2)
        >>> source = "je vous remercie beaucoup de votre attention .".split()
        >>> targets = "thank you very much for your attention .", "the vote will take place tomorrow at noon .", "thank"
        >>> [one.flags for one in inspector.inspect([source] * 3, [target.split() for target in targets])]
        [(), ('unrelated',), ('truncated',)]
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TranslationTokenizer,
        *,
        layer: int | Literal["auto", "highest-norm"] = "auto",
        head: int | Literal["auto"] = "auto",
        all_measures: bool = False,
        max_tokens: int = 4096,
    ) -> None:
        self.aligner = WordAligner(model, tokenizer, layer=layer, head=head, recipe=_RECIPE, max_tokens=max_tokens)
        self.model, self.tokenizer = model, tokenizer
        self._meter = NormMeter(model)
        self._all_measures = all_measures
        self._max_tokens = max_tokens

    def inspect(self, sources: Sequence[Words], targets: Sequence[Words]) -> list[Inspection]:
        """Inspect sentence pairs, given as words.

        Raises:
            InvalidInputError: the numbers of sentences differ, or a pair cannot be used: a side is empty, a string
                instead of words or too long for the model.
            CaptumNormError: norms cannot be measured in the model.
        """
        pairs = sentence_pairs(sources, targets)
        inspections = []
        for index, inspection in sorted(self.inspect_each(pairs), key=lambda answer: answer[0]):
            if isinstance(inspection, InvalidInputError):
                raise InvalidInputError(f"pair {index}: {inspection}")
            inspections.append(inspection)
        return inspections

    def inspect_each(self, pairs: Pairs) -> Iterator[tuple[int, Inspection | InvalidInputError]]:
        """Yield each pair's index and inspection, or an error that says why it cannot be used."""
        if not pairs:
            return
        refused: dict[int, InvalidInputError] = {}
        passes: dict[int, _Pass] = {}
        choice = self.aligner.choose(pairs)
        piece_maps = self._piece_maps(choice.layer, passes)
        options: Any = {"max_tokens": self._max_tokens, "on_error": refused.__setitem__}
        inspections = {
            index: _inspection(*pairs[index], maps, choice.head, passes.pop(index))
            for index, maps in word_maps(
                self.model, self.tokenizer, pairs, piece_maps, settings=("AWI", "AWO"), **options
            )
        }
        yield from refused.items()
        doubted = [index for index, inspection in inspections.items() if self._doubts(inspection)]
        without = self._scores({index: (NO_SOURCE, pairs[index][1]) for index in doubted})
        exchanged = self._scores({index: pairs[index][::-1] for index in doubted})
        for index, inspection in inspections.items():
            log_probability = inspection.log_probability
            told = information(log_probability, without[index]) if index in without else None
            gain = exchanged[index] - log_probability if index in exchanged else None
            complete = replace(inspection, information=told, exchange=gain)
            yield index, replace(complete, flags=flags_of(complete))

    def _doubts(self, inspection: Inspection) -> bool:
        doubtful = inspection.log_probability < DOUBT["log_probability"]
        covered = min(inspection.source_coverage, inspection.target_coverage)
        return self._all_measures or doubtful or covered < DOUBT["coverage"]

    def _scores(self, pairs: Mapping[int, tuple[Words, Words]]) -> dict[int, float]:
        """The mean log-probability of each pair; none of a pair that cannot be used."""
        indices = list(pairs)
        scores = target_log_probabilities(
            self.model, self.tokenizer, list(pairs.values()), max_tokens=self._max_tokens, on_error=lambda *_: None
        )
        return {indices[place]: float(steps.mean()) for place, steps in scores}

    def _piece_maps(self, layer: int, passes: "dict[int, _Pass]") -> PieceMaps:
        """Compute the maps of a layer's heads and of the last layer's, and note what else the pass shows."""

        def maps(batch: TeacherForcedBatch) -> Tensor:
            with recorded_logits(self.model, batch) as logits:
                measured = self._meter.measure(
                    batch.inputs, scopes=["atb"], head_norms=True, stacks=["cross", "decoder"]
                )
            cross, decoder = measured["cross"], measured["decoder"]
            heads = cast(Tensor, cross.head_norms)
            count = heads.shape[1]
            if not -count <= layer < count:
                raise InvalidInputError(f"got layer {layer}; the model has {count}: 0 to {count - 1}")
            scores = batch_log_probabilities(logits(), batch)
            shares = source_shares(cross.mixing_ratio["atb"], decoder.norms["atb"])
            for row, (index, score, target) in enumerate(zip(batch.indices, scores, batch.target, strict=True)):
                steps = emitted_steps(target)
                ends = len(score) == steps.stop - steps.start
                share = shares[row, : len(target.ids)][steps].mean().item()
                passes[index] = _Pass(score, ends, share)
            return heads[:, [layer, -1]]

        return maps


class _Pass(NamedTuple):
    """What a pass over a pair shows besides maps."""

    scores: NDArray[np.float64]
    """The log-probabilities of the target's pieces."""
    ends: bool
    """Whether the last of them is that of the end of sentence."""
    share: float


def source_shares(cross: Tensor, decoder: Tensor) -> Tensor:
    """The source's share of the last decoder layer's output at every position: ALTI+ without the encoder.

    Its rows sum to 1, so they do not change the sum over source positions. ``cross`` is (B, L, T), the share of
    cross-attention, against the residual stream, in each layer; ``decoder`` is (B, L, T, T), the maps of
    self-attention, not necessarily normalised; the result is (B, T), from 0 to 1.

    >>> import torch
    >>> source_shares(torch.tensor([[[0.5, 0.5], [0.5, 0.5]]]), torch.eye(2).expand(1, 2, 2, 2))
    tensor([[0.7500, 0.7500]])
    """
    encoder = decoder.new_ones(len(cross), cross.shape[1], 1, 1)
    source, _ = encoder_decoder_rollout(encoder, decoder, cross.unsqueeze(-1))
    return source.squeeze(-1)


def _inspection(source: Words, target: Words, maps: WordMaps, head: int | None, result: _Pass) -> Inspection:
    """The measures of a pair, from maps (2, H, T, S + 1) of the chosen layer and the last one."""
    chosen, last = head_map(maps["AWI"][0], head), head_map(maps["AWO"][1], None)
    links = _RECIPE.decode(_RECIPE.word_map({"AWI": chosen, "AWO": last}, "AWI"))
    sides = coverage(calibrated(links.all_probabilities()))
    uncovered, added = ((side < COVERED).tolist() for side in sides)
    repeated = repeated_words(target)
    return Inspection(
        log_probability=float(result.scores.mean()),
        end_log_probability=float(result.scores[-1]) if result.ends else None,
        source_share=result.share,
        link_entropy=link_entropy(chosen),
        source_coverage=float(sides[0].mean()),
        target_coverage=float(sides[1].mean()),
        gap=longest_run(uncovered) / len(source),
        target_gap=longest_run(added) / len(target),
        repetition=max(0, len(repeated) - len(repeated_words(source))) / len(target),
        copied=copied(source, target),
        numbers=shared_numbers(source, target),
        names=shared_names(source, target),
        information=None,
        exchange=None,
        uncovered=tuple(np.flatnonzero(uncovered).tolist()),
        added=tuple(np.flatnonzero(added).tolist()),
        repeated=repeated,
    )
