"""Calls a SentenceTransformer by the arguments of its Transformer, and compares its embedding with those of texts."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.checks import shown
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.models.hooks import evaluating
from captum_norm.models.offloading import input_device

SENTENCE_TRANSFORMER = {"SentenceTransformer": "sentence_transformers."}
_EMBEDDING = "sentence_embedding"


class SentenceEncoder(nn.Module):
    """A SentenceTransformer that takes the arguments of its Transformer, not a dictionary of features.

    It returns ``sentence_embedding`` (B, E), ``last_hidden_state`` (B, S, D), and with texts to compare with ``logits``
    (B, C). The similarity is that of the SentenceTransformer, cosine or dot product.

    Args:
        whole: the SentenceTransformer; its modules are shared.
        texts: C texts to compare with.

    Attributes:
        whole: the same.
        texts: the same.
        references: the embeddings of the texts, (C, E), of length 1 for cosines; None without texts.

    Raises:
        UnsupportedModelError: it does not begin with a Transformer, or its similarity is a distance.
    """

    references: Tensor | None

    def __init__(self, whole: Any, texts: Sequence[str] = ()) -> None:
        super().__init__()
        self.whole = whole
        self.texts = tuple(texts)
        self.norm = _UnitLength()
        self.transformer  # noqa: B018 - refused before anything runs
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
        found = getattr(first, "auto_model", None)
        if not isinstance(found, nn.Module):
            raise UnsupportedModelError(
                f"got a SentenceTransformer that begins with {type(first).__name__}; expected a Transformer; explain "
                "the Transformers in it one by one"
            )
        return found

    @property
    def config(self) -> Any:
        """The configuration of the Transformer."""
        return self.transformer.config

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self.whole.tokenizer

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
        found = whole.preprocess(texts, prompt=prompt)
        device = input_device(self)
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in found.items()}

    def forward(self, **arguments: Any) -> dict[str, Tensor]:
        """Run the modules one after the other."""
        features = {name: value for name, value in arguments.items() if value is not None}
        for module in self.whole:
            # Older versions always normalise the embedding.
            if type(module).__name__ == "Normalize" and getattr(module, "module_input_name", _EMBEDDING) == _EMBEDDING:
                features[_EMBEDDING] = self.norm(features[_EMBEDDING])
            else:
                features = module(features)
        embedding = features[_EMBEDDING]
        output = {_EMBEDDING: embedding, "last_hidden_state": features["token_embeddings"]}
        if self.references is not None:
            output["logits"] = self._compared(embedding) @ self.references.to(embedding).T
        return output

    def _compared(self, embedding: Tensor) -> Tensor:
        """What similarities are scalar products of, (B, E)."""
        embedding = embedding[:, : self.whole.truncate_dim]
        compared: Tensor = self.norm(embedding) if self.whole.similarity_fn_name == "cosine" else embedding
        return compared


class _UnitLength(nn.Module):
    """Divides vectors (..., E) by their lengths.

    The root of the mean square is that of a module that methods recognise, so that they may freeze it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root_mean_square = _RootMeanSquare()

    def forward(self, vectors: Tensor) -> Tensor:
        divided: Tensor = self.root_mean_square(vectors)
        return divided / math.sqrt(vectors.shape[-1])


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
        if not is_instance(model, SENTENCE_TRANSFORMER):
            raise InvalidInputError(f"got a model of type {type(model).__name__}; expected a SentenceTransformer")
        if not texts or any(type(text) is not str or not text.strip() for text in texts):
            raise InvalidInputError(f"got {shown(texts)}; expected texts to compare with")
        super().__init__(model, texts)


def is_instance(value: object, classes: Mapping[str, str]) -> bool:
    """Whether a value is an instance of one of some classes, given with the beginnings of their modules' names.

    Their packages are not imported.
    """
    found = ((kind.__module__, classes.get(kind.__name__)) for kind in type(value).__mro__)
    return any(begin is not None and module.startswith(begin) for module, begin in found)
