"""Explains generated text: what each token of an answer rests on, in the prompt and in the answer before it."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from captum.attr import Attribution
from captum.log import log_usage
from torch import Tensor, nn

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.attr.flow_graph import FlowGraph
from captum_norm.attr.information_flow import InformationFlow
from captum_norm.attr.output import OutputAttribution
from captum_norm.checks import check_bool, check_index, check_number, quoted
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.forward.request import Request
from captum_norm.generation import prompts
from captum_norm.generation.result import DEPENDENT, Explained, GenerationResult
from captum_norm.generation.teacher_forcing import Inputs, TeacherForcing
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import evaluating
from captum_norm.models.inputs import bind_inputs
from captum_norm.models.libraries.huggingface import HUGGING_FACE
from captum_norm.models.model import library_of
from captum_norm.models.outputs import Difference, logits_of, name_outputs
from captum_norm.models.token_inputs import with_outputs
from captum_norm.results.aggregation import CAUSAL_ROLLOUT, ROLLED
from captum_norm.results.maps import SourceAndPrefix
from captum_norm.results.outputs import NamedOutput
from captum_norm.text.words import Span, token_texts

# Rows of methods that run the model once a row, in one batch.
BATCH = 16

Rows = tuple[Tensor, Tensor | None]
"""The scores of every input position for each token, (R, K), of an encoder–decoder model the source's before the target
prefix's; and the completeness error of each row, (R,), or None for a method without one."""


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
        explainer: Any = method
        model = getattr(explainer, "model", None)
        if not isinstance(explainer, Attribution) or not isinstance(model, nn.Module):
            got = f"a {type(method).__name__}" if isinstance(method, nn.Module) else quoted(method)
            raise InvalidInputError(
                f"got the method {got}; expected one of captum_norm, such as NormAttribution(model), or "
                "TokenAttribution(model, ...) for a method of Captum"
            )
        self.tokenizer = tokenizer_of(method, tokenizer)
        if not callable(self.tokenizer):
            got = "no tokenizer" if self.tokenizer is None else f"the tokenizer {quoted(self.tokenizer)}"
            raise InvalidInputError(f"got {got}; pass the model's: GenerationAttribution(method, tokenizer)")
        if library_of(model) is not HUGGING_FACE:
            raise UnsupportedModelError(
                f"got {type(model).__name__}, which is no Hugging Face model; call the method itself with the tokens "
                "of prompt and answer, and the positions that predict the answer"
            )
        super().__init__(model)
        self.method: Any = explainer
        self.model = cast(Any, model)
        self._forcing = TeacherForcing(model, self.tokenizer)

    def __repr__(self) -> str:
        return f"GenerationAttribution({self.method!r})"

    @log_usage()  # type: ignore[untyped-decorator]
    def attribute(
        self,
        prompt: str | Sequence[prompts.Message] | prompts.Prompt | Tensor,
        target: str | Sequence[int] | Tensor | None = None,
        *,
        gen_args: Mapping[str, Any] | None = None,
        outputs: Span | str | None = None,
        contrast: str | Sequence[int] | Tensor | None = None,
        segments: prompts.Segmentation | None = None,
        hops: int = 0,
        per_token: bool = True,
        graph_threshold: float | None = None,
        context: str | Sequence[str] | None = None,
        context_threshold: float | None = None,
    ) -> GenerationResult:
        """Explain an answer, generated or given.

        Args:
            prompt: a text, token ids (N,) or (1, N), the messages of a conversation, which go into the tokenizer's
                chat template, or the prompt of a :class:`captum_norm.generation.Response`.
            target: the answer to explain, a text or token ids; None generates one.
            gen_args: arguments of the model's ``generate``; by default 25 new tokens, greedily. An answer ends at the
                latest with the model's last position.
            outputs: the part of the answer to explain, by its text or as (start, end) in tokens; all of it if None.
            contrast: another answer: explained is the logit of the first token in which the answers differ less that
                of the other answer's; for methods that explain outputs.
            segments: how to group the prompt's tokens, see :data:`captum_norm.generation.Segmentation`. A method that
                averages the layers' maps of vectors (``aggregation="mean"``) adds the vectors of a segment for all
                outputs before it takes the norm; scores of others are added.
            hops: hand importance on this many times from the answer's tokens before ``outputs``, such as a chain of
                thought, to what these rest on [Pan et al. 2026]; scores below zero hand on nothing.
            per_token: False explains the outputs together alone, in one backward pass of a method that has them. A
                method that averages the layers' maps of vectors then adds the vectors of all outputs before it takes
                norms or distances: the span scores of FlashTrace [Pan et al. 2026] with ``ALTI``.
            graph_threshold: also follow the routes to the outputs, above this importance, with ``InformationFlow``.
            context: also measure how much each output depends on this piece of the prompt's text, or these, in order,
                by two forward passes [Sarti et al. 2024], one without the tokens of the pieces and of the white space
                behind them: ``pcxmi`` and ``kl`` of the result.
            context_threshold: explain only outputs whose ``kl`` is at least this; the rows of others are 0.

        Raises:
            InvalidInputError: prompt, answer, outputs, segments or contrast do not fit together or the model.
            CaptumNormError: see the method's ``attribute``.
        """
        kind = type(self.method).__name__
        tokenized = self._forcing.prompt(prompt)
        answer = self._forcing.answer(tokenized, target, gen_args)
        texts = token_texts(answer, self.tokenizer)
        start, end = prompts.span_of(outputs, texts, "".join(texts))
        rival = None
        if contrast is not None:
            other = self._forcing.answer(tokenized, contrast)
            start = self._difference(answer, other, (start, end))
            end, rival = start + 1, other[start]
        hops = check_index("hops", hops)
        if hops < 0 or (hops and start == 0):
            raise InvalidInputError(
                f"got hops={hops}; expected 0 or more, and outputs= behind the tokens to hand importance on through"
            )
        names, numbers = (None, []) if segments is None else prompts.segments_of(tokenized, segments)
        together = not check_bool("per_token", per_token)
        least = DEPENDENT if context_threshold is None else check_number("context_threshold", context_threshold)

        inputs, index = self._forcing.inputs(tokenized.ids, answer[:end]), torch.arange(end - start)
        if isinstance(self.method, AttentionMapAttribution):
            self.method.call_of(dict(inputs), None, Request())  # from now on its aggregation is known
        begin = [] if self._forcing.continued else [self.tokenizer.convert_ids_to_tokens(self._forcing.begin)]
        tokens = [*token_texts(tokenized.ids, self.tokenizer), *begin, *texts[: end - 1]]
        pcxmi: Tensor | None = None
        kl: Tensor | None = None
        if context is not None:
            without = self._forcing.inputs(prompts.without_context(tokenized, context), answer[:end])
            pcxmi, kl = self._dependence([inputs, without], answer[start:end])
        if context_threshold is not None:
            if kl is None or (_adds_vectors(self.method) and (together or names is not None)):
                raise InvalidInputError(
                    "got context_threshold=, which needs context=, and for segments= or per_token=False a method that "
                    "does not add the vectors of all outputs, such as one of outputs"
                )
            index = (kl >= least).nonzero().flatten()
        chosen, none = (index + start).tolist(), (torch.zeros(0, len(tokens)), None)
        rowed = partial(answer_rows, self.method, inputs, answer[:end], chosen, rival, together=together)
        named = partial(self._named, answer[start:end], rival)
        (rows, deltas), predicted = with_outputs(rowed if chosen else lambda: none, named, self.model, dict(inputs))
        template = torch.tensor(tokenized.template + [False] * (len(tokens) - len(tokenized.ids)))
        scores = _of_inputs(rows, template)
        total = scores.sum(0)
        if hops:
            before, _ = answer_rows(self.method, inputs, answer[:end], range(start))
            between = _of_inputs(before, template).clamp(min=0)
            total = handed_on(total.clamp(min=0), between, len(tokens) - end + 1, hops)
        segment_attr = None
        if names is not None and not hops and _adds_vectors(self.method):
            segment_attr = _segment_norms(self.method, inputs, numbers, end - start)
        elif names is not None:
            places = torch.tensor(numbers)
            inside = places >= 0
            segment_attr = total.new_zeros(len(names)).index_add(0, places[inside], total[: len(places)][inside])
        return GenerationResult(
            input_tokens=tokens,
            output_tokens=texts[start:end],
            seq_attr=total,
            token_attr=None if together else scores.new_zeros(end - start, len(tokens)).index_copy(0, index, scores),
            prompt_length=len(tokenized.ids),
            template=template.tolist(),
            explained=Explained(
                model=type(self.model).__name__,
                method=str(getattr(self.method, "name", None) or getattr(self.method, "signature", kind)),
                unit=_unit(self.method),
                prompt=tokenized.text,
                answer="".join(texts),
                outputs=(start, end),
                contrast=None if rival is None else self.tokenizer.decode([rival]),
                hops=hops,
                note=CAUSAL_ROLLOUT if self._forcing.continued and _unit(self.method) == ROLLED else "",
                context=[context] if isinstance(context, str) else list(context or ()),
                context_threshold=least,
            ),
            outputs=predicted,
            segments=names,
            segment_attr=segment_attr,
            convergence_delta=None if deltas is None else float(deltas.abs().max()),
            graph=None if graph_threshold is None else self._graph(inputs, end - start, graph_threshold),
            pcxmi=pcxmi,
            kl=kl,
        )

    def _dependence(self, sides: Sequence[Inputs], answer: Sequence[int]) -> Tensor:
        """Compare the predictions of an answer with a context and without it: P-CXMI and divergence in nats, (2, R)."""
        read = []
        for inputs in sides:
            call = bind_inputs(self.model, dict(inputs))
            with torch.no_grad(), evaluating(self.model):
                logits = logits_of(call.model, call.run())
            if not isinstance(logits, Tensor) or logits.dim() != 3:
                raise UnsupportedModelError(
                    f"got context=, but {type(self.model).__name__} returns no logits; take a model with its head"
                )
            read.append(logits[0, -len(answer) :])
        numbers = []
        for row, other, token in zip(*read, answer, strict=True):  # for which the memory is that of one token
            wide = torch.promote_types(row.dtype, torch.float32)
            known = row.to(wide).log_softmax(0)
            gain = known - other.to(wide).log_softmax(0)
            divergence = (known.exp() * gain).where(known.isfinite(), 0).sum().clamp(min=0)
            numbers.append(torch.stack([gain[token], divergence]))
        return torch.stack(numbers, 1).cpu()

    def _named(self, tokens: list[int], rival: int | None, call: ModelCall, returned: Any) -> list[NamedOutput]:
        """Name the tokens explained, whose logits are those of the last positions of the first example."""
        logits = logits_of(call.model, returned)
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            return []
        chosen = torch.tensor(tokens)
        if rival is not None:
            chosen = torch.stack([chosen, torch.full_like(chosen, rival)], 1)
        return name_outputs(
            call.model, logits[0, -len(tokens) :], chosen, self.tokenizer, explained=_explains_output(self.method)
        )

    def _graph(self, inputs: Inputs, count: int, threshold: float) -> FlowGraph:
        """Follow the routes to the last outputs, heads added up."""
        if not isinstance(self.method, InformationFlow):
            raise InvalidInputError(
                f"got graph_threshold=, but {type(self.method).__name__} follows no routes; take InformationFlow"
            )
        (graph,) = self.method.graphs(dict(inputs), position="all", threshold=threshold, per_head=False)
        return graph.to(*(node.position for node in graph.outputs[-count:]))

    def _difference(self, answer: Sequence[int], other: Sequence[int], outputs: Span) -> int:
        """Return the first token in which two answers differ."""
        if not _explains_output(self.method):
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


def tokenizer_of(method: Any, tokenizer: Any = None) -> Any:
    """Return a tokenizer, or else that of a method; None if it has none."""
    session = getattr(method, "session", None)
    known = tokenizer, getattr(session, "tokenizer", None), getattr(method, "_tokenizer", None)
    return next((candidate for candidate in known if candidate is not None), None)


def aggregated_unit(method: AttentionMapAttribution) -> str:
    """Return what the scores of a method's layers together are."""
    entry, aggregation = method.units.entry, method.aggregation
    return method.units.together or (f"mean {entry}" if aggregation == "mean" else f"share of {aggregation}")


def _unit(method: Any) -> str:
    if not isinstance(method, AttentionMapAttribution):
        return "part of the logit"
    return (method.units.target or method.units.entry) if _explains_output(method) else aggregated_unit(method)


def _explains_output(method: Any) -> bool:
    """Return whether a method explains a logit, not the state that it is computed from."""
    return not isinstance(method, AttentionMapAttribution) or method.target != "never"


def _adds_vectors(method: Any) -> bool:
    """Return whether a method scores a segment by the vectors of its tokens added up."""
    return not _explains_output(method) and method.segmented and method.aggregation == "mean"


def _of_inputs(scores: Tensor, template: Tensor) -> Tensor:
    """Drop the scores of virtual tokens, which come first, and set those of a chat template to 0: (R, K)."""
    return scores.detach().cpu()[:, -len(template) :].masked_fill(template, 0)


def answer_rows(
    method: Any,
    inputs: Inputs,
    answer: Sequence[int],
    rows: Sequence[int],
    contrast: int | None = None,
    *,
    together: bool = False,
) -> Rows:
    """Compute the rows of some of an answer's tokens, for one of them less a contrast's logit, or one of their sum."""
    if together and _adds_vectors(method):
        scores, deltas = _span_row(method, inputs, len(rows))
    elif not _explains_output(method):
        parts, delta = method.scores_of_last(dict(inputs), len(answer))
        index = list(rows)
        scores, deltas = _flat(parts)[index], None if delta is None else delta.expand(len(answer))[index]
    else:
        # From the end, which virtual tokens of a prompt do not move.
        tokens, positions = [answer[row] for row in rows], [row - len(answer) for row in rows]
        scores, deltas = _logit_rows(method, inputs, tokens, contrast, positions, together=together)
    if not together or len(scores) == 1:
        return scores, deltas
    return scores.sum(0, keepdim=True), None if deltas is None else deltas.amax(0, keepdim=True)


def _span_row(method: Any, inputs: Inputs, last: int) -> Rows:
    """Score inputs by the vectors that they give to the last tokens of an answer together."""
    stacks = ("cross", "decoder") if "decoder_input_ids" in inputs else (None,)
    parts = [_added_vectors(method, inputs, stack, last) for stack in stacks]
    deltas = [delta for _, delta in parts if delta is not None]
    return torch.cat([scores for scores, _ in parts], -1), torch.stack(deltas).amax(0) if deltas else None


def _segment_norms(method: Any, inputs: Inputs, numbers: Sequence[int], last: int) -> Tensor:
    """Score segments by the vectors that their tokens together give to the last tokens, (G,)."""
    ids = inputs["input_ids"]
    segments = torch.tensor([[*numbers, *[-1] * (ids.shape[1] - len(numbers))]], device=ids.device)
    stack = "cross" if "decoder_input_ids" in inputs else None
    scores, _ = _added_vectors(method, inputs, stack, last, segments)
    return scores[0].cpu()


def _added_vectors(method: Any, inputs: Inputs, stack: str | None, last: int, segments: Tensor | None = None) -> Rows:
    """Return the norms of the vectors that the last tokens receive, added up, as a mean over layers, (1, K)."""
    stacks = None if stack is None else [stack]
    maps = method.maps(dict(inputs), stacks=stacks, last=last, segments=segments, together=True)
    layers = maps.self_attention if stack is None else getattr(maps, stack)
    return layers.mean(1)[0], None if maps.convergence_delta is None else maps.convergence_delta.amax(1)


def _logit_rows(
    method: Any, inputs: Inputs, answer: list[int], contrast: int | None, positions: list[int], *, together: bool
) -> Rows:
    """Explain the logits of tokens, in one pass or each on a copy of the example."""
    if isinstance(method, OutputAttribution):
        tokens = torch.tensor([answer])
        target = tokens if contrast is None else Difference(tokens, contrast)
        parts = method.decompose(dict(inputs), target, position=[positions], together=together)
        return _flat(parts.scores), parts.convergence_delta.flatten()
    scores, deltas = [], []
    with_delta = method.has_convergence_delta()
    for first in range(0, len(answer), BATCH):
        chosen, places = answer[first : first + BATCH], positions[first : first + BATCH]
        targets: Any = chosen if contrast is None else Difference(chosen, [contrast] * len(chosen))
        copies = {name: tensor.expand(len(places), *tensor.shape[1:]) for name, tensor in inputs.items()}
        if with_delta:
            rows, delta = method.attribute(copies, targets, position=places, return_convergence_delta=True)
            deltas.append(delta)
        else:
            rows = method.attribute(copies, targets, position=places)
        scores.append(_flat(rows))
    return torch.cat(scores), torch.cat(deltas) if deltas else None


def _flat(scores: Any) -> Tensor:
    """Put the scores of an encoder–decoder model's two inputs side by side, those of one example's rows in (R, K)."""
    joined: Tensor = torch.cat(list(scores), -1) if isinstance(scores, SourceAndPrefix) else scores
    return joined.squeeze(0) if joined.dim() == 3 else joined


def handed_on(importance: Tensor, rows: Tensor, first: int, hops: int) -> Tensor:
    """Replace the importance of intermediate tokens by the importance of what these rest on [Pan et al. 2026].

    In each hop every intermediate token, such as one of a chain of thought, gives what it has to the positions before
    it, in proportion to its own row: p ← p outside + Σ_t p_t r_t / Σ_j r_tj. What still rests on intermediate tokens
    after the last hop stays there, so the sum does not change. A token whose row is 0 keeps what it has.

    Args:
        importance: of every input position for the outputs explained, (K,), not negative.
        rows: those of the T intermediate tokens, (T, K), not negative, each 0 from its own position on.
        first: position of the first intermediate token, those of the others follow.
        hops: how often.

    Returns:
        (K,).

    Example:
        >>> rows = torch.tensor([[1.0, 3.0, 0.0]])
        >>> handed_on(torch.tensor([0.2, 0.0, 0.8]), rows, first=2, hops=1)
        tensor([0.4000, 0.6000, 0.0000])
    """
    sums = rows.sum(1, keepdim=True)
    shares = rows / torch.where(sums > 0, sums, torch.ones_like(sums))
    between = slice(first, first + len(rows))
    has_row = (sums.squeeze(1) > 0).to(importance)
    for _ in range(hops):
        handed = importance[between] * has_row
        importance = importance + handed @ shares
        importance[between] -= handed
    return importance
