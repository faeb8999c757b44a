"""Explains generated text: what each token of an answer rests on, in the prompt and in the answer before it."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from captum.attr import Attribution
from captum.log import log_usage
from torch import Tensor, nn

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.attr.flow_graph import FlowGraph
from captum_norm.attr.information_flow import InformationFlow
from captum_norm.checks import check_bool, check_index, quoted
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.generation.prompts import (
    Prompt,
    Segmentation,
    check_ids,
    read_answer,
    read_prompt,
    segments_of,
    span_of,
)
from captum_norm.generation.result import Explained, GenerationResult
from captum_norm.generation.rows import (
    Inputs,
    adds_vectors,
    answer_rows,
    explains_output,
    handed_on,
    segment_norms,
)
from captum_norm.models.hooks import evaluating
from captum_norm.models.libraries.huggingface import HUGGING_FACE
from captum_norm.models.libraries.registry import library_of
from captum_norm.models.offloading import input_device
from captum_norm.models.stacks import encoder_of
from captum_norm.models.wrappers import config_of
from captum_norm.text.words import Span, token_texts

GENERATION: Mapping[str, Any] = {"max_new_tokens": 25, "do_sample": False}
"""How answers are generated unless ``gen_args`` says otherwise, as in Captum."""


class GenerationAttribution(Attribution):
    r"""Explains what a language model generates, as :class:`captum.attr.LLMAttribution`, with any method.

    The answer's tokens are explained together: a method that explains hidden states, such as
    :class:`captum_norm.NormAttribution`, by one teacher-forced pass over prompt and answer, each token by the position
    that predicts it; a method that explains outputs, such as :class:`captum_norm.DecompX`, by the logit of each token.

    Args:
        method: an attribution method of a language model or a translation model: one of this package, or
            :class:`captum_norm.TokenAttribution` of a method of Captum.
        tokenizer: the model's; None if the method has one.

    Raises:
        InvalidInputError: the method is something else, or there is no tokenizer.
        UnsupportedModelError: its model is not one of Hugging Face.

    Example:
        >>> from captum_norm import DecompX, GenerationAttribution
        >>> from captum_norm.loading import LANGUAGE_MODEL, load
        >>> model, tokenizer = load(LANGUAGE_MODEL)
        >>> passages = ["Clara found a tiny silver ring in the garden.", "Victor works as a baker near the river."]
        >>> prompt = "\n".join([*passages, "What did Clara find? Clara found"])
        >>> result = GenerationAttribution(DecompX(model), tokenizer).attribute(prompt, segments=passages)
        >>> result.explained.answer
        ' a tiny silver ring in the garden.'
        >>> result.top(1)[0][0]
        'Clara found a tiny silver ring in the garden.'
    """

    def __init__(self, method: Attribution, tokenizer: Any = None) -> None:
        given: Any = method
        model = getattr(given, "model", None)
        if not isinstance(given, Attribution) or not isinstance(model, nn.Module):
            raise InvalidInputError(
                f"got the method {quoted(method)}; expected one of captum_norm, such as NormAttribution(model), or "
                "TokenAttribution(model, ...) for a method of Captum"
            )
        session = getattr(method, "session", None)
        known = [tokenizer, getattr(session, "tokenizer", None), getattr(method, "_tokenizer", None)]
        self.tokenizer: Any = next((found for found in known if found is not None), None)
        if self.tokenizer is None:
            raise InvalidInputError("got no tokenizer; pass the model's: GenerationAttribution(method, tokenizer)")
        if library_of(model) is not HUGGING_FACE:
            raise UnsupportedModelError(
                f"got {type(model).__name__}, which is no Hugging Face model; call the method itself with the tokens "
                "of prompt and answer, and the positions that predict the answer"
            )
        super().__init__(model)
        self.method: Any = given
        self.model = cast(Any, model)
        self._continued = encoder_of(model) is None

    @log_usage()  # type: ignore[untyped-decorator]
    def attribute(
        self,
        prompt: str | Sequence[Mapping[str, str]] | Tensor,
        target: str | Sequence[int] | Tensor | None = None,
        *,
        gen_args: Mapping[str, Any] | None = None,
        chat: bool = False,
        outputs: Span | str | None = None,
        contrast: str | Sequence[int] | Tensor | None = None,
        segments: Segmentation | None = None,
        hops: int = 0,
        keep_template: bool = False,
        per_token: bool = True,
        graph_threshold: float | None = None,
    ) -> GenerationResult:
        """Explain an answer, generated or given.

        Args:
            prompt: a text, token ids (N,) or (1, N), or the messages of a conversation, which go into the tokenizer's
                chat template.
            target: the answer to explain, a text or token ids; None generates one.
            gen_args: arguments of the model's ``generate``; by default 25 new tokens, greedily. An answer ends at the
                latest with the model's last position.
            chat: put the text of a prompt into the chat template as a user's turn.
            outputs: the part of the answer to explain, by its text or as (start, end) in tokens; all of it if None.
            contrast: another answer: explained is the logit of the first token in which the answers differ less that
                of the other answer's; for methods that explain outputs.
            segments: how to group the prompt's tokens, see :data:`captum_norm.generation.Segmentation`. A method that
                averages the layers' maps of vectors (``aggregation="mean"``) adds the vectors of a segment for all
                outputs before it takes the norm; scores of others are added.
            hops: hand importance on this many times from the answer's tokens before ``outputs``, such as a chain of
                thought, to what these rest on [Pan et al. 2026]; scores below zero hand on nothing.
            keep_template: keep scores of tokens that a chat template adds, which are 0 otherwise.
            per_token: False explains the outputs together alone, in one backward pass of a method that has them. A
                method that averages the layers' maps of vectors then adds the vectors of all outputs before it takes
                norms or distances: the span scores of FlashTrace [Pan et al. 2026] with ``ALTI``.
            graph_threshold: also follow the routes to the outputs, above this importance, with ``InformationFlow``.

        Returns:
            the scores.

        Raises:
            InvalidInputError: prompt, answer, outputs, segments or contrast do not fit together or the model.
            CaptumNormError: see the method's ``attribute``.
        """
        read = read_prompt(prompt, self.tokenizer, chat=check_bool("chat", chat), continued=self._continued)
        answer = self._answer(read, target, gen_args)
        texts = token_texts(answer, self.tokenizer)
        start, end = span_of(outputs, texts, "".join(texts))
        other = None if contrast is None else read_answer(contrast, read, self.tokenizer, continued=self._continued)
        rival = None
        if other is not None:
            start = self._difference(answer, other, (start, end))
            end, rival = start + 1, other[start]
        hops = check_index("hops", hops)
        if hops < 0 or (hops and start == 0):
            raise InvalidInputError(
                f"got hops={hops}; expected 0 or more, and outputs= behind the tokens to hand importance on through"
            )
        names, numbers = (None, []) if segments is None else segments_of(read, segments)
        inputs = self._inputs(read.ids, answer[:end])
        together = not check_bool("per_token", per_token)
        rows, deltas = answer_rows(self.method, inputs, answer[:end], slice(start, end), rival, together=together)
        tokens = [*token_texts(read.ids, self.tokenizer), *self._between(texts, end)]
        template = torch.tensor(read.template + [False] * (len(tokens) - len(read.ids)))
        hidden = torch.zeros_like(template) if check_bool("keep_template", keep_template) else template
        scores = _of_inputs(rows, hidden)
        graph = None if graph_threshold is None else self._graph(inputs, end - start, graph_threshold)
        whole = scores.sum(0)
        if hops:
            before, _ = answer_rows(self.method, inputs, answer[:end], slice(0, start))
            between = _of_inputs(before, hidden).clamp(min=0)
            whole = handed_on(whole.clamp(min=0), between, len(tokens) - end + 1, hops)
        segment_attr = None
        if names is not None and not hops and adds_vectors(self.method):
            segment_attr = segment_norms(self.method, inputs, numbers, end - start)
        elif names is not None:
            segment_attr = _summed(whole, numbers, len(names))
        return GenerationResult(
            input_tokens=tokens,
            output_tokens=texts[start:end],
            seq_attr=whole,
            token_attr=None if together else scores,
            prompt_length=len(read.ids),
            template=template.tolist(),
            explained=Explained(
                method=_name(self.method),
                unit=_unit(self.method),
                prompt=read.text,
                answer="".join(texts),
                outputs=(start, end),
                contrast=None if rival is None else self.tokenizer.decode([rival]),
                hops=hops,
            ),
            segments=names,
            segment_attr=segment_attr,
            convergence_delta=None if deltas is None else float(deltas.abs().max()),
            graph=graph,
        )

    def _answer(self, prompt: Prompt, target: Any, gen_args: Mapping[str, Any] | None) -> list[int]:
        if target is None:
            return self._generated(prompt.ids, GENERATION if gen_args is None else gen_args)
        if gen_args is not None:
            raise InvalidInputError("got target= and gen_args=; a given answer is not generated")
        return read_answer(target, prompt, self.tokenizer, continued=self._continued)

    def _generated(self, ids: Sequence[int], gen_args: Mapping[str, Any]) -> list[int]:
        generate = getattr(self.model, "generate", None)
        if generate is None:
            raise UnsupportedModelError(f"{type(self.model).__name__} cannot generate; pass the answer: target=")
        check_ids(ids, _vocabulary(self.model), self._longest, type(self.model).__name__)
        most = gen_args.get("max_new_tokens")
        if self._longest is not None and most is not None:
            room = self._longest - len(ids) + 1 if self._continued else self._longest
            gen_args = {**gen_args, "max_new_tokens": min(most, room)}
        prompt = self._tensor(ids)
        with torch.no_grad(), evaluating(self.model):
            found = generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **gen_args)
        found = list(getattr(found, "sequences", found)[0].tolist())
        answer = found[len(ids) :] if self._continued else found[1:]
        while answer and answer[-1] in self._ends():
            answer.pop()
        if not answer:
            raise InvalidInputError("the model generated nothing but the end of its answer; pass target= or gen_args=")
        return answer

    @property
    def _longest(self) -> int | None:
        """Number of positions that the model has."""
        longest: int | None = getattr(config_of(self.model), "max_position_embeddings", None)
        return longest

    def _ends(self) -> set[Any]:
        """Tokens that end an answer, and padding behind it."""
        stops = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        return {
            self.tokenizer.eos_token_id,
            self.tokenizer.pad_token_id,
            *(stops if isinstance(stops, list) else [stops]),
        }

    def _inputs(self, prompt: Sequence[int], answer: Sequence[int]) -> Inputs:
        """Put prompt and answer into the model's arguments; the last token is predicted, not read."""
        longest, name = self._longest, type(self.model).__name__
        if self._continued:
            check_ids([*prompt, *answer], _vocabulary(self.model), None if longest is None else longest + 1, name)
            ids = self._tensor([*prompt, *answer[:-1]])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        begin = getattr(config_of(self.model), "decoder_start_token_id", None)
        if begin is None:
            raise UnsupportedModelError(
                f"{name} names no decoder_start_token_id, so its decoder's inputs are not known"
            )
        check_ids(prompt, _vocabulary(self.model), longest, name)
        check_ids(answer, _vocabulary(self.model.get_decoder()), longest, name)
        ids = self._tensor(prompt)
        decoder_ids = self._tensor([begin, *answer[:-1]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": decoder_ids}

    def _graph(self, inputs: Inputs, count: int, threshold: float) -> FlowGraph:
        """Follow the routes to the last outputs, heads added up."""
        if not isinstance(self.method, InformationFlow):
            raise InvalidInputError(
                f"got graph_threshold=, but {type(self.method).__name__} follows no routes; take InformationFlow"
            )
        (found,) = self.method.graphs(dict(inputs), position="all", threshold=threshold, per_head=False)
        return found.to(*(node.position for node in found.outputs[-count:]))

    def _between(self, texts: Sequence[str], end: int) -> list[str]:
        """Texts of the inputs behind the prompt: the answer's tokens, of a decoder after its start."""
        before = list(texts[: end - 1])
        if self._continued:
            return before
        begin = config_of(self.model).decoder_start_token_id
        return [self.tokenizer.convert_ids_to_tokens(begin), *before]

    def _difference(self, answer: Sequence[int], other: Sequence[int], outputs: Span) -> int:
        """Return the first token in which two answers differ."""
        if not explains_output(self.method):
            raise InvalidInputError(
                f"got contrast=, but {type(self.method).__name__} explains no logit; take DecompX, AttnLRP or another "
                "method of outputs"
            )
        differing = [place for place, (a, b) in enumerate(zip(answer, other, strict=False)) if a != b]
        if not differing or not outputs[0] <= differing[0] < outputs[1]:
            raise InvalidInputError(
                "got a contrast that does not differ from the answer's tokens to explain; expected another answer"
            )
        return differing[0]

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=input_device(self.model))


def _of_inputs(scores: Tensor, hidden: Tensor) -> Tensor:
    """Drop the scores of virtual tokens, which come first, and set those of hidden inputs to 0: (R, K)."""
    return scores.detach().cpu()[:, -len(hidden) :].masked_fill(hidden, 0)


def _vocabulary(model: Any) -> int:
    return len(model.get_input_embeddings().weight)


def _summed(scores: Tensor, numbers: Sequence[int], count: int) -> Tensor:
    """Add the scores of each segment's tokens, (G,)."""
    segments = torch.tensor(numbers)
    inside = segments >= 0
    return scores.new_zeros(count).index_add(0, segments[inside], scores[: len(segments)][inside])


def _name(method: Any) -> str:
    return str(getattr(method, "name", None) or getattr(method, "signature", type(method).__name__))


def _unit(method: Any) -> str:
    if not isinstance(method, AttentionMapAttribution):
        return "part of the logit"
    units = method.units
    if method.target != "never":
        return units.target or units.entry
    return units.together or (
        f"mean {units.entry}" if method.aggregation == "mean" else f"share of {method.aggregation}"
    )
