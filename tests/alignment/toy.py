"""A translation model and a method whose maps have numbers that can be recognised."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alignment.tokenization import EncodedSentence
from captum_norm import AttributionMaps, InvalidInputError

PAIRS = [
    (["a|b", "c"], ["x", "y|z"]),
    (["d"], ["u|v|w"]),
    (["e", "f|g|h", "i"], ["x", "~", "y", "z"]),
    (["~", "b"], ["x|x", "u|v"]),
]


class ToyTokenizer:
    """Cuts words at ``|``; ``~`` has no piece. Special tokens: one code before each side, ``</s>`` behind it."""

    def encode_source(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        return [self._encode(words) for words in sentences]

    encode_target = encode_source

    def decode_target(self, ids: Sequence[int]) -> list[str]:
        return [chr(index) for index in ids if index > 4]

    def _encode(self, words: Sequence[str]) -> EncodedSentence:
        if "bad" in words:
            raise InvalidInputError("got a bad word")
        pieces = [(piece, index) for index, word in enumerate(words) for piece in word.split("|") if piece != "~"]
        return EncodedSentence(
            [3, *(ord(piece) for piece, _ in pieces), 2], [None, *(index for _, index in pieces), None]
        )


class ToyModel(nn.Module):
    """Takes what fairseq's models take; never run."""

    def __init__(self, longest: int = 30) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(2, 2)
        self.longest = longest

    def max_positions(self) -> tuple[int, int]:
        return self.longest, self.longest

    def forward(self, src_tokens: Tensor, src_lengths: Tensor, prev_output_tokens: Tensor) -> Tensor:
        raise NotImplementedError


class ToyMethod:
    """A method whose cross-attention maps are a function of layer, head and the ids that are read.

    Args:
        entries: (layer, head, what the decoder reads (B, T, 1), source ids (B, 1, S)) -> (B, T, S).
        layers: how many layers it has.
        heads: how many heads each has; all together they are the sum.
    """

    def __init__(self, entries: Callable[[int, int, Tensor, Tensor], Tensor], layers: int = 3, heads: int = 2) -> None:
        self.entries, self.layers, self.heads = entries, layers, heads
        self.asked: list[tuple[Sequence[int] | None, bool]] = []

    def maps(
        self, inputs: Any, *, layers: Sequence[int] | None, per_head: bool, stacks: Collection[Any] | None
    ) -> AttributionMaps:
        assert stacks == ["cross"]
        self.asked.append((layers, per_head))
        read, source = inputs["prev_output_tokens"][:, :, None], inputs["src_tokens"][:, None, :]
        chosen = [range(self.layers)[layer] for layer in (range(self.layers) if layers is None else layers)]
        cross = torch.stack(
            [
                torch.stack([self.entries(layer, head, read, source) for head in range(self.heads)], 1)
                for layer in chosen
            ],
            1,
        )
        maps = cross if per_head else cross.sum(2)
        return AttributionMaps(None, None, maps, None, None, source[:, 0] != 1)


def toy_gradients(_: Any, inputs: dict[str, Tensor], labels: Tensor, *, kind: str) -> Tensor:
    """In place of the real ones: numbers of either sign that are another map for each kind."""
    ids, factor = inputs["input_ids"][:, None, :], 7 if kind == "saliency" else 5
    return ((ids * factor + labels.clamp(min=0)[:, :, None] * 3) % 11 - 4.5) * (inputs["attention_mask"][:, None, :])
