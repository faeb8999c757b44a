"""Returns the module and tokenizer inside a model, pipeline or SentenceTransformer, and tokenizes texts for it."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from captum_norm.checks import quoted
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.models.hooks import evaluating
from captum_norm.models.offloading import input_device
from captum_norm.models.wrappers import config_of, explained_module

if TYPE_CHECKING:
    from transformers import BatchEncoding

Texts = str | list[str] | list[tuple[str, str]]
"""A text, or several, or pairs of texts, for a model whose tokenizer is known."""

_HOLDERS = {"Pipeline": "transformers.", "CrossEncoder": "sentence_transformers."}
_SENTENCE_TRANSFORMER = {"SentenceTransformer": "sentence_transformers."}
_EMBEDDING = "sentence_embedding"

Explainable = Any
"""What methods accept as a model: a module, or what holds one and its tokenizer, as a pipeline of transformers."""


def opened(model: Explainable, tokenizer: Any = None) -> tuple[nn.Module, Any]:
    """Return the module to explain in a model, pipeline, SentenceTransformer or CrossEncoder, and its tokenizer."""
    held: Any = model if _is_instance(model, _HOLDERS) else explained_module(model)
    if _is_instance(held, _SENTENCE_TRANSFORMER):
        held = SentenceEncoder(held)
    module = explained_module(held.model) if _is_instance(held, _HOLDERS) else held
    if tokenizer is None and (module is not held or isinstance(held, SentenceEncoder)):
        tokenizer = held.tokenizer
    return module, tokenizer


def _is_instance(value: object, classes: Mapping[str, str]) -> bool:
    """Whether a value is of one of some classes, named with their packages, which are not imported."""
    kinds = ((kind.__module__, classes.get(kind.__name__)) for kind in type(value).__mro__)
    return any(begin is not None and module.startswith(begin) for module, begin in kinds)


def are_texts(inputs: object) -> TypeGuard[Texts]:
    """Whether inputs are a text, or a list of texts or of pairs of texts."""
    listed = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(listed, list) or not listed:
        return False
    pairs = (value if isinstance(value, tuple) and len(value) == 2 else (value,) for value in listed)
    return all(isinstance(part, str) for pair in pairs for part in pair)


def tokenized(model: nn.Module, texts: Texts, tokenizer: Any) -> Mapping[str, Any]:
    """Turn texts into the arguments of a model, on its device, untruncated but by a SentenceTransformer's limit."""
    listed = [texts] if isinstance(texts, str) else texts
    if not callable(tokenizer):
        got = "no tokenizer" if tokenizer is None else f"the tokenizer {quoted(tokenizer)}"
        raise InvalidInputError(
            f"got the text {quoted(listed[0])} and {got}; create the method with the model's, tokenizer=, or pass what "
            'the tokenizer returns: tokenizer(texts, return_tensors="pt")'
        )
    if isinstance(model, SentenceEncoder) and tokenizer is model.tokenizer:
        return model.features(listed)
    options = {"truncation": False, "verbose": False}
    try:
        # The tokenizers of many causal models have no padding token; which one it is does not matter.
        if len(listed) > 1 and getattr(tokenizer, "pad_token_id", 0) is None:
            return _padded([tokenizer(text, return_attention_mask=True, **options) for text in listed], model)
        batch: BatchEncoding = tokenizer(listed, return_tensors="pt", padding=len(listed) > 1, **options)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InvalidInputError(f"{type(tokenizer).__name__} cannot tokenize the inputs: {reason[:300]}") from error
    return batch.to(input_device(model))


def _padded(encoded: Sequence[Mapping[str, list[int]]], model: nn.Module) -> dict[str, Tensor]:
    """Pad to one batch, (B, S) each."""
    padding = {"input_ids": getattr(config_of(model), "pad_token_id", None) or 0}
    columns = {name: [torch.tensor(text[name]) for text in encoded] for name in encoded[0]}
    return {
        name: pad_sequence(rows, batch_first=True, padding_value=padding.get(name, 0)).to(input_device(model))
        for name, rows in columns.items()
    }


class SentenceEncoder(nn.Module):
    """A SentenceTransformer that takes its Transformer's arguments and returns similarities to texts as ``logits``."""

    references: Tensor | None  # the embeddings of the texts to compare with, (C, E), of length 1 for cosines

    def __init__(self, whole: Any, texts: Sequence[str] = ()) -> None:
        super().__init__()
        self.whole = whole
        self.texts = tuple(texts)
        self.root_mean_square = _RootMeanSquare()
        self.transformer  # noqa: B018 - refused before anything runs
        self.tokenizer = whole.tokenizer
        self.register_buffer("references", None)
        if not texts:
            return
        if whole.similarity_fn_name not in ("cosine", "dot"):
            raise UnsupportedModelError(
                f"got a SentenceTransformer whose similarity is {whole.similarity_fn_name}; expected cosine or dot, as "
                'by similarity_fn_name="cosine"'
            )
        with torch.no_grad(), evaluating(self):
            self.references = self._compared(self(**self.features(list(texts)))[_EMBEDDING])

    @property
    def transformer(self) -> nn.Module:
        """The model of transformers inside."""
        first = next(self.whole.children(), None)
        transformer = getattr(first, "auto_model", None)
        if not isinstance(transformer, nn.Module):
            raise UnsupportedModelError(
                f"got a SentenceTransformer that begins with {type(first).__name__}; expected a Transformer; explain "
                "the Transformers in it one by one"
            )
        return transformer

    @property
    def pooling(self) -> str | None:
        """What its only pooling is called; None if it has none, or several."""
        modes = [getattr(module, "pooling_mode", None) for module in self.whole.children()]
        named = [mode for mode in modes if isinstance(mode, str)]
        return named[0] if len(named) == 1 else None

    def features(self, texts: list[Any]) -> dict[str, Any]:
        """Turn texts, or pairs of texts, into arguments on its device, as ``encode`` does with the default prompt."""
        whole = self.whole
        prompt = None if whole.default_prompt_name is None else whole.prompts.get(whole.default_prompt_name)
        features, device = whole.preprocess(texts, prompt=prompt), input_device(self)
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in features.items()}

    def forward(self, **arguments: Any) -> dict[str, Tensor]:
        """Run the modules one after the other."""
        features = {name: value for name, value in arguments.items() if value is not None}
        for module in self.whole:
            # Older versions always normalise the embedding.
            if type(module).__name__ == "Normalize" and getattr(module, "module_input_name", _EMBEDDING) == _EMBEDDING:
                features[_EMBEDDING] = self._unit(features[_EMBEDDING])
            else:
                features = module(features)
        embedding = features[_EMBEDDING]
        output = {_EMBEDDING: embedding, "last_hidden_state": features["token_embeddings"]}
        if self.references is not None:
            output["logits"] = self._compared(embedding) @ self.references.to(embedding).T
        return output

    def _unit(self, vectors: Tensor) -> Tensor:
        """Divide vectors (..., E) by their lengths, in a module that methods recognise, so that they may freeze it."""
        divided: Tensor = self.root_mean_square(vectors)
        return divided / math.sqrt(vectors.shape[-1])

    def _compared(self, embedding: Tensor) -> Tensor:
        """Return what similarities are scalar products of, (B, E)."""
        embedding = embedding[:, : self.whole.truncate_dim]
        return self._unit(embedding) if self.whole.similarity_fn_name == "cosine" else embedding


class _RootMeanSquare(nn.Module):
    """Divides vectors of any width by the root of their mean square."""

    eps = 1e-24

    def forward(self, vectors: Tensor) -> Tensor:
        wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(vectors.dtype)


class SentenceSimilarity(SentenceEncoder):
    """The similarities of a SentenceTransformer's embedding to those of given texts: a model with a logit for each.

    Every method with a ``target`` explains them: why two sentences are near (the target 0 of one text), or why one is
    nearer to a text than to another (``Difference(0, 1)``). The texts are embedded once, now.

    Args:
        model: a SentenceTransformer, left unchanged; the similarity is its own, cosine or dot product.
        texts: the texts to compare with.

    Raises:
        InvalidInputError: the model is no SentenceTransformer, or there are no texts.
        UnsupportedModelError: its similarity is a distance, or it does not begin with a Transformer.

    Example:
        >>> from captum_norm import DecompX
        >>> from sentence_transformers import SentenceTransformer
        >>> model = SentenceTransformer(folder)  # doctest: +SKIP
        >>> near = SentenceSimilarity(model, "A dog runs.", "The market fell.")  # doctest: +SKIP
        >>> DecompX(near).attribute("Two dogs run along the beach.", target=0)  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module, *texts: str) -> None:
        if not _is_instance(model, _SENTENCE_TRANSFORMER):
            raise InvalidInputError(f"got a model of type {type(model).__name__}; expected a SentenceTransformer")
        if not texts or any(type(text) is not str or not text.strip() for text in texts):
            raise InvalidInputError(f"got {quoted(texts)}; expected texts to compare with")
        super().__init__(model, texts)
