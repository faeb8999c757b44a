"""What a generated answer rests on: the result of :class:`captum_norm.GenerationAttribution`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from captum.attr import LLMAttributionResult
from torch import Tensor

from captum_norm.attr.flow_graph import FlowGraph
from captum_norm.checks import check_count, quoted
from captum_norm.errors import InvalidInputError
from captum_norm.results.base import Result, contents
from captum_norm.results.outputs import NamedOutput, share_text
from captum_norm.results.stacks import place_of
from captum_norm.text.characters import spelled_out
from captum_norm.text.words import WordScore, words_of_text
from captum_norm.versions import versions

DEPENDENT = 0.1
"""Nats of divergence at which a token of an answer depends on the context, unless another threshold is given."""


@dataclass(frozen=True)
class Explained:
    """What was explained, and how.

    Attributes:
        model: the model's name or class; empty in results of earlier versions.
        method: the method's name.
        unit: what the scores are.
        prompt: the prompt's text, with its chat template; None if token ids were given.
        answer: the answer's text.
        outputs: the first of the answer's tokens that are explained, and one behind the last.
        contrast: the text of the token whose logit is subtracted, if one is.
        hops: how often importance was handed on through the answer's tokens before these.
        gap: mean and largest difference to the log-probabilities of the server that answered, in nats; None without.
        note: what to know before reading the scores, such as what a rollout does; empty if there is nothing.
        context: the pieces of the prompt that the outputs may depend on; none if this was not asked.
        context_threshold: the divergence at which they do.
    """

    model: str
    method: str
    unit: str
    prompt: str | None
    answer: str
    outputs: tuple[int, int]
    contrast: str | None = None
    hops: int = 0
    gap: tuple[float, float] | None = None
    note: str = ""
    context: Sequence[str] = ()
    context_threshold: float = DEPENDENT


class GenerationResult(Result, LLMAttributionResult):
    """Scores of the inputs of a language model for each token of an answer, as Captum's result for language models.

    ``result[2]`` is what the third of the tokens explained rests on.

    Attributes:
        input_tokens: texts of the K inputs: the prompt's N tokens, then the answer's before the last one explained; of
            an encoder–decoder model the source's, then the decoder's.
        output_tokens: texts of the R tokens explained.
        token_attr: the score of each input for each of these, (R, K), 0 for inputs that come after it; None if only
            the whole was explained.
        seq_attr: the scores of the inputs for all of these together, (K,): the sum of ``token_attr``, or with
            ``hops`` what this sum rests on.
        prompt_length: N.
        template: which inputs a chat template added, whose scores are 0, (K,).
        segments: names of the segments of the prompt, if it was divided.
        segment_attr: the score of each segment for the R tokens together, (G,); None without segments.
        convergence_delta: the largest completeness error of the rows; None for a method without one.
        explained: what was explained, and how.
        outputs: each of the R tokens with the probability that the model gives it after what comes before, and the
            three likeliest there; none in results of earlier versions.
        graph: the routes to the R tokens, if they were requested; of an encoder–decoder model in both stacks.
        pcxmi: how much likelier the context makes each of the R tokens, log p with it less log p without it, (R,), in
            nats, of words the sum; None if no context was given.
        kl: the divergence of what is predicted there with the context from that without it, (R,), of words the largest.
    """

    _axes = MappingProxyType(
        {
            "input_tokens": ("K",),
            "output_tokens": ("R",),
            "seq_attr": ("K",),
            "token_attr": ("RK",),
            "template": ("K",),
            "segments": ("G",),
            "segment_attr": ("G",),
            "pcxmi": ("R",),
            "kl": ("R",),
        }
    )

    _added = MappingProxyType({"graph": None, "outputs": []})

    @classmethod
    def _upgraded(cls, content: dict[str, Any], version: int) -> dict[str, Any]:
        """Return the content of a file of an earlier version, without the model's name, or without a context."""
        content = {"pcxmi": None, "kl": None} | super()._upgraded(content, version)
        added: dict[str, Any] = {"model": "", "gap": None, "note": "", "context": [], "context_threshold": DEPENDENT}
        return content | {"explained": added | content["explained"]}

    def __init__(
        self,
        *,
        input_tokens: list[str],
        output_tokens: list[str],
        seq_attr: Tensor,
        token_attr: Tensor | None,
        prompt_length: int,
        template: Sequence[bool],
        explained: Explained,
        outputs: Sequence[NamedOutput] = (),
        segments: Sequence[str] | None = None,
        segment_attr: Tensor | None = None,
        convergence_delta: float | None = None,
        graph: FlowGraph | None = None,
        pcxmi: Tensor | None = None,
        kl: Tensor | None = None,
    ) -> None:
        super().__init__(
            input_tokens=input_tokens, output_tokens=output_tokens, seq_attr=seq_attr, token_attr=token_attr
        )
        self.prompt_length = prompt_length
        self.template = tuple(template)
        self.explained = explained
        self.outputs = tuple(outputs)
        self.segments = None if segments is None else tuple(segments)
        self.segment_attr = segment_attr
        self.convergence_delta = convergence_delta
        self.graph = graph
        self.pcxmi, self.kl = pcxmi, kl

    def __repr__(self) -> str:
        """Summarise the result: the answer and its probability, the method, and what it rests on most."""
        best = ", ".join(f"{token!r} {score:.3g}" for token, score in self.top(3))
        rows, delta = len(self.output_tokens), self.convergence_delta
        ends = "" if delta is None else f"; convergence delta {delta:.1e}"
        answer, chance = quoted(self.explained.answer), self.probability
        shown = "" if chance is None else f", {share_text(chance)}"
        what = f"{answer}{shown}; {self.explained.method}, {self.explained.model}"
        return spelled_out(f"GenerationResult({what}: {rows} tokens rest on {best}{ends})")

    def __len__(self) -> int:
        return len(self.output_tokens)

    def __getitem__(self, token: int) -> "GenerationResult":
        """Return the same for one of the tokens explained, or one of their words: its own scores, without hops.

        Segments and the graph, which are of all of them together, are left out.

        Raises:
            InvalidInputError: there is no such token, or only the whole was explained.
        """
        place = place_of("token", token, len(self))
        if self.token_attr is None:
            raise InvalidInputError(
                "got the scores of an answer as a whole; explain each of its tokens: per_token=True"
            )
        first, end = self.explained.outputs
        # Words have the tokens of all.
        outputs = (first + place, first + place + 1) if end - first == len(self) else (first, end)
        return self._with(
            output_tokens=[self.output_tokens[place]],
            seq_attr=self.token_attr[place],
            token_attr=self.token_attr[place : place + 1],
            outputs=self.outputs[place : place + 1],
            pcxmi=None if self.pcxmi is None else self.pcxmi[place : place + 1],
            kl=None if self.kl is None else self.kl[place : place + 1],
            explained=replace(self.explained, outputs=outputs, hops=0),
            segments=None,
            segment_attr=None,
        )

    def __iter__(self) -> Iterator["GenerationResult"]:
        return (self[token] for token in range(len(self)))

    def top(self, count: int = 10) -> list[tuple[str, float]]:
        """Return the segments of highest score, or, without segments, the inputs: their texts and scores."""
        names, scores = self.input_tokens, self.seq_attr
        if self.segments is not None and self.segment_attr is not None:
            names, scores = list(self.segments), self.segment_attr
        best = scores.topk(min(check_count("count", count), len(names)))
        return [(names[index], score) for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)]

    def words(self, score: WordScore = "sum") -> "GenerationResult":
        """Return the same result by words: scores of words of the inputs, and a row for each word of the answer.

        A row is the sum of those of its tokens, as the whole is the sum of all rows, and so explains the sum of their
        logits, which is the value of the word's output. Its probability is the product of theirs: that of the word
        after all that comes before it. Words of several tokens have no three likeliest.

        Args:
            score: how the score of an input's word comes from those of its tokens: ``"sum"``, ``"mean"`` or ``"max"``.
        """
        inputs, outputs = (words_of_text(texts) for texts in (self.input_tokens, self.output_tokens))
        rows = self.token_attr
        if rows is not None:
            rows = outputs.scores(inputs.scores(rows, score).T, "sum").T
        first = [inputs.numbers.index(number) for number in range(len(inputs.texts))]
        parts: list[list[NamedOutput]] = [[] for _ in outputs.texts]
        for number, output in zip(outputs.numbers, self.outputs, strict=False):
            parts[number].append(output)
        return self._with(
            input_tokens=list(inputs.texts),
            output_tokens=list(outputs.texts),
            seq_attr=inputs.scores(self.seq_attr, score),
            token_attr=rows,
            outputs=list(map(_together, outputs.texts, parts)) if self.outputs else (),
            pcxmi=None if self.pcxmi is None else outputs.scores(self.pcxmi, "sum"),
            kl=None if self.kl is None else outputs.scores(self.kl, "max"),
            prompt_length=len({*inputs.numbers[: self.prompt_length]}),
            template=[self.template[place] for place in first],
        )

    @property
    def probability(self) -> float | None:
        """The probability of all tokens explained after the prompt, the product of theirs; None where one has none."""
        return _product(self.outputs)

    @property
    def dependent(self) -> list[bool] | None:
        """Whether each of the tokens explained depends on the context; None if no context was given."""
        return None if self.kl is None else (self.kl >= self.explained.context_threshold).tolist()

    def _with(self, **changes: Any) -> "GenerationResult":
        """Change fields, without the graph, which is of all tokens together."""
        return GenerationResult(**contents(self) | {"graph": None} | changes)

    def facts(self) -> dict[str, str]:
        """Names and values to print beside the scores."""
        first, end = self.explained.outputs
        facts = {"answer": self.explained.answer, "tokens": f"{first} to {end - 1}"}
        if self.outputs:
            facts["token probabilities"] = ", ".join(map(str, self.outputs))
        facts |= {"model": self.explained.model, "method": self.explained.method}
        if self.explained.contrast is not None:
            facts["rather than"] = self.explained.contrast
        if self.explained.hops:
            facts["hops"] = str(self.explained.hops)
        if self.dependent is not None:
            texts = [f"“{text}”" for text, depends in zip(self.output_tokens, self.dependent, strict=True) if depends]
            facts["depend on the context"] = ", ".join(texts) or "none"
        if self.convergence_delta is not None:
            facts["convergence delta"] = f"{self.convergence_delta:.1e}"
        return facts

    def _json(self) -> Any:
        """Return everything."""
        return vars(self.explained) | {
            "outputs": [contents(output) for output in self.outputs],
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "prompt_length": self.prompt_length,
            "template": list(self.template),
            "scores": self.seq_attr.tolist(),
            "token_scores": None if self.token_attr is None else self.token_attr.tolist(),
            "segments": None if self.segments is None else list(self.segments),
            "segment_scores": None if self.segment_attr is None else self.segment_attr.tolist(),
            "convergence_delta": self.convergence_delta,
            "pcxmi": None if self.pcxmi is None else self.pcxmi.tolist(),
            "kl": None if self.kl is None else self.kl.tolist(),
            "versions": versions(),
        }

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each input, its number, text and score, for all tokens together and then for each of them.

        A row begins with the number of the token explained, None for all together, its text and its probability, and,
        if a context was given, ``pcxmi`` and ``kl``, for all together their sum and the largest.
        """
        unknown = [None] * (1 + len(self))
        columns: dict[str, list[Any]] = {
            "explained": [None, *range(len(self))],
            "output": ["".join(self.output_tokens), *self.output_tokens],
            "probability": [self.probability, *(one.probability for one in self.outputs)] if self.outputs else unknown,
        }
        if self.pcxmi is not None and self.kl is not None:
            columns["pcxmi"] = [float(self.pcxmi.sum()), *self.pcxmi.tolist()]
            columns["kl"] = [float(self.kl.max()), *self.kl.tolist()]
        rows = [self.seq_attr, *(() if self.token_attr is None else self.token_attr)]
        return [
            {name: column[row] for name, column in columns.items()} | {"index": index, "token": token, "score": score}
            for row, scores in enumerate(rows)
            for index, (token, score) in enumerate(zip(self.input_tokens, scores.tolist(), strict=True))
        ]


def _product(outputs: Sequence[NamedOutput]) -> float | None:
    """Return the probability of tokens that follow each other; None if one has none."""
    shares = [output.probability for output in outputs if output.probability is not None]
    return math.prod(shares) if shares and len(shares) == len(outputs) else None


def _together(word: str, outputs: Sequence[NamedOutput]) -> NamedOutput:
    """Return the output of a word from those of its tokens."""
    if len(outputs) == 1:
        return outputs[0]
    value = math.fsum(output.value for output in outputs)
    return NamedOutput(None, word, value, _product(outputs), explained=outputs[0].explained)
