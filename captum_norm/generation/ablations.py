"""What an answer's probability is when some of its prompt's sources are taken out."""

import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from captum.attr import Attribution
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from captum_norm.bars import bar
from captum_norm.checks import check_count
from captum_norm.errors import InvalidInputError
from captum_norm.generation.prompts import Message, Segmentation, segments_of, with_space
from captum_norm.generation.result import Explained, GenerationResult
from captum_norm.generation.teacher_forcing import TeacherForcing
from captum_norm.models.hooks import evaluating
from captum_norm.models.outputs import name_outputs
from captum_norm.text.words import token_texts

__all__ = ["SourceAblations", "SourceAttribution"]


class SourceAblations:
    r"""Computes how probable a model finds an answer without some of the prompt's sources.

    A source is a segment of the prompt. To take one out, its tokens are deleted, and the white space behind it; all
    other tokens stay, such as a question and a chat template.

    Args:
        model: a language model or a translation model of Hugging Face; not changed.
        tokenizer: the model's.
        prompt: a text, or the messages of a conversation.
        target: the answer, a text or token ids; None generates one.
        segments: the sources, see :data:`captum_norm.generation.Segmentation`.
        gen_args: arguments of the model's ``generate``, as for :class:`captum_norm.GenerationAttribution`.
        batch_tokens: the most tokens in one forward pass, or one prompt if it is longer.

    Attributes:
        sources: the texts of the K sources.
        numbers: the source of each of the prompt's tokens, −1 for none.
        answer: the answer's T token ids.
        inputs: the model's arguments for prompt and answer, whose last T positions predict the answer.

    Raises:
        InvalidInputError: prompt, answer and segments do not fit together or the model.

    Example:
        >>> from captum_norm.loading import LANGUAGE_MODEL, load
        >>> passages = ["Clara found a tiny silver ring in the garden.", "Victor works as a baker near the river."]
        >>> prompt = "\n".join([*passages, "What did Clara find? Clara found"])
        >>> model, tokenizer = load(LANGUAGE_MODEL)
        >>> ablations = SourceAblations(model, tokenizer, prompt, " a tiny silver ring", segments=passages)
        >>> kept = torch.tensor([[True, True], [False, True], [True, False]])
        >>> ablations.log_probabilities(kept).sum(1).exp().round(decimals=2)
        tensor([1., 0., 1.], dtype=torch.float64)
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        prompt: str | Sequence[Message],
        target: str | Sequence[int] | None = None,
        *,
        segments: Segmentation,
        gen_args: Mapping[str, Any] | None = None,
        batch_tokens: int = 4096,
    ) -> None:
        self._forcing = forcing = TeacherForcing(model, tokenizer)
        read = forcing.prompt(prompt)
        names, numbers = segments_of(read, segments)
        self.answer = tuple(forcing.answer(read, target, gen_args))
        self.sources = tuple(names)
        self.numbers = tuple(with_space(read, numbers))
        self._read, self._prompt, self._sources = read, torch.tensor(read.ids), torch.tensor(self.numbers)
        # Some rotary positions turn by the length of the longest text in a call, so each text is run alone.
        kinds = [str(getattr(module, "rope_type", "")) for module in model.modules()]
        alone = any("dynamic" in kind or "longrope" in kind for kind in kinds)
        batch_tokens = check_count("batch_tokens", batch_tokens)
        self._batch_tokens = 1 if alone else batch_tokens
        self._shares = forcing.continued  # whether texts that begin alike share the model's cache of their beginning
        self.inputs = forcing.inputs(read.ids, self.answer)

    @property
    def answer_text(self) -> str:
        """The answer's text."""
        return "".join(token_texts(self.answer, self._forcing.tokenizer))

    def log_probabilities(self, kept: Tensor) -> Tensor:
        """Compute the log-probability of each of the answer's tokens, after those before it.

        Args:
            kept: True at the sources that stay, of N prompts, (N, K); equal rows are run once.

        Returns:
            (N, T), float64.

        Raises:
            InvalidInputError: ``kept`` has another shape or dtype, or leaves a prompt without a token.
        """
        mask: Any = kept
        if getattr(mask, "dtype", None) != torch.bool or mask.shape[1:] != (len(self.sources),):
            got = f"{tuple(mask.shape)}, {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
            raise InvalidInputError(f"got kept {got}; expected True or False for each source, (N, {len(self.sources)})")
        rows, places = kept.cpu().unique(dim=0, return_inverse=True)
        # A column more, for the tokens of no source, whose number is −1.
        stays = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)[:, self._sources]
        if not stays.any(1).all():
            raise InvalidInputError(
                "without these sources no token is left in the prompt; leave some text, such as the question, outside "
                "of the sources"
            )
        found = torch.empty(len(rows), len(self.answer), dtype=torch.float64)
        with torch.no_grad(), evaluating(self._forcing.model), bar("ablating", len(rows), "prompts") as shown:
            for batch in self._batches(stays):
                found[batch] = self._run([self._prompt[row] for row in stays[batch]], _shared(stays[batch]))
                shown.update(len(batch))
        return found[places]

    def result(self, scores: Tensor, method: str, unit: str) -> GenerationResult:
        """Make the result of a method that scores the sources, (K,); a source's tokens share its score."""
        forcing, count = self._forcing, len(self.answer)
        with torch.no_grad(), evaluating(forcing.model):
            logits = forcing.model(**self.inputs).logits[0, -count:]
        texts = token_texts(self.answer, forcing.tokenizer)
        begin = [] if forcing.continued else [forcing.tokenizer.convert_ids_to_tokens(forcing.begin)]
        names = [*token_texts(self._read.ids, forcing.tokenizer), *begin, *texts[:-1]]
        behind = len(names) - len(self.numbers)
        # A column more, for the tokens of no source, whose number is −1.
        shares = torch.cat([scores / self._sources[self._sources >= 0].bincount(), scores.new_zeros(1)])
        explained = (type(forcing.model).__name__, method, unit, self._read.text, self.answer_text, (0, count))
        chosen = torch.tensor(self.answer)
        return GenerationResult(
            input_tokens=names,
            output_tokens=texts,
            seq_attr=nn.functional.pad(shares[self._sources], (0, behind)),
            token_attr=None,
            prompt_length=len(self.numbers),
            template=[*self._read.template, *[False] * behind],
            explained=Explained(*explained),
            outputs=name_outputs(forcing.model, logits, chosen, forcing.tokenizer, explained=False),
            segments=self.sources,
            segment_attr=scores,
        )

    def _batches(self, stays: Tensor) -> Sequence[Tensor]:
        """Divide prompts by their lengths, or by how they begin: whichever has the model run on fewer tokens."""
        lengths = stays.sum(1)
        rows = max(1, self._batch_tokens // (int(lengths.max()) + len(self.answer)))

        def tokens(batches: Sequence[Tensor]) -> int:
            return sum(
                len(batch) * int(lengths[batch].max()) - (len(batch) - 1) * _shared(stays[batch]) for batch in batches
            )

        by_length = lengths.argsort(descending=True, stable=True).split(rows)
        return min(by_length, torch.arange(len(stays)).split(rows), key=tokens) if self._shares else by_length

    def _run(self, prompts: Sequence[Tensor], shared: int) -> Tensor:
        """Run the model on prompts, of which so many first tokens are shared, and the answer, (N, T)."""
        forcing, answer, count = self._forcing, torch.tensor(self.answer), len(self.answer)
        device = forcing.tensor([0]).device
        begun = self._begun(prompts[0][:shared], len(prompts)) if self._shares and shared else {}
        texts = [torch.cat([prompt, answer[:-1]]) if forcing.continued else prompt for prompt in prompts]
        if begun:
            texts = [text[shared:] for text in texts]
        lengths = torch.tensor([len(text) for text in texts])
        ids = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=self.answer[-1])
        arguments: dict[str, Any] = {"input_ids": ids.to(device), "use_cache": bool(begun), **begun}
        # No token of a causal model sees the padding behind it, so it needs no mask.
        if not forcing.continued:
            mask = torch.arange(ids.shape[1]) < lengths[:, None]
            decoder = forcing.inputs(prompts[0].tolist(), self.answer)["decoder_input_ids"]
            arguments |= {"attention_mask": mask.long().to(device), "decoder_input_ids": decoder.expand(len(ids), -1)}
        arguments |= self._last(ids.shape[1] - int(lengths.min()) + count)
        logits = forcing.model(**arguments).logits
        padding = ids.shape[1] - lengths if forcing.continued else torch.zeros_like(lengths)
        places = logits.shape[1] - count - padding[:, None] + torch.arange(count)
        places = places.to(logits.device)
        chosen = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[2]))
        target = answer.to(chosen.device).expand(len(ids), -1)[..., None]
        found: Tensor = chosen.double().log_softmax(-1).gather(2, target)[..., 0].cpu()
        return found

    def _begun(self, tokens: Tensor, rows: int) -> dict[str, Any]:
        """Run the model on what so many texts begin with; return the arguments that go on from there, if it can."""
        forcing = self._forcing
        found = forcing.model(forcing.tensor(tokens.tolist()), use_cache=True, **self._last(1))
        cache = getattr(found, "past_key_values", None)
        # Sliding windows, states of scans and virtual tokens go other ways than keys and values of these tokens alone.
        layers = getattr(cache, "layers", [None])
        self._shares = all(type(layer) is DynamicLayer and layer.get_seq_length() == len(tokens) for layer in layers)
        if cache is None or not self._shares:
            return {}
        cache.batch_repeat_interleave(rows)
        return {"past_key_values": cache}

    def _last(self, positions: int) -> dict[str, int]:
        """Return the argument by which a language model computes logits of the last positions alone, if it has one."""
        takes = (
            self._forcing.continued and "logits_to_keep" in inspect.signature(self._forcing.model.forward).parameters
        )
        return {"logits_to_keep": positions} if takes else {}


def _shared(stays: Tensor) -> int:
    """Count the first tokens that all rows share, but for the last one of a row, which predicts the answer."""
    if len(stays) == 1:
        return 0
    alike = (stays == stays[0]).all(0).cumprod(0).bool()
    return min(int((alike & stays[0]).sum()), int(stays.sum(1).min()) - 1)


class SourceAttribution(Attribution):
    """Base class of methods that score the sources of a prompt for an answer.

    Args:
        model: a language model or a translation model of Hugging Face; not changed.
        tokenizer: the model's.
    """

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        super().__init__(model)
        self.model, self.tokenizer = model, tokenizer

    def attribute(
        self,
        prompt: str | Sequence[Message],
        target: str | Sequence[int] | None = None,
        *,
        segments: Segmentation,
        gen_args: Mapping[str, Any] | None = None,
    ) -> GenerationResult:
        """Explain an answer, generated or given, by the prompt's sources.

        Args:
            prompt: as for :class:`SourceAblations`.
            target: the answer; None generates one.
            segments: the sources.
            gen_args: arguments of the model's ``generate``.

        Returns:
            a source's score in ``segment_attr``, which its tokens share in ``seq_attr``.
        """
        options: Any = {"segments": segments, "gen_args": gen_args}
        return self.explain(SourceAblations(self.model, self.tokenizer, prompt, target, **options))

    @abstractmethod
    def explain(self, ablations: SourceAblations) -> GenerationResult:
        """Explain an answer that can be ablated."""
