"""Small models of torch.nn's Transformer modules in the manner of tutorials, and the direct way through them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests import classifiers
from tests.oracle import Layer, plain_layer, watched

PAD, VOCABULARY, WIDTH, HEADS, HIDDEN, LONGEST = 0, 40, 16, 4, 24, 40
QUIET = [
    pytest.mark.filterwarnings(f"ignore:{begin}")
    for begin in ("enable_nested_tensor is True", "The PyTorch API of nested tensors")
]
"""What torch says of its own defaults and of its own fused operation."""


class Classifier(nn.Module):
    """Embedding, encoder, mean of the real tokens, head; over (B, S), or (S, B) if not ``batch_first``."""

    def __init__(self, layers: int = 2, **options: Any) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, **options)
        fused = layer.self_attn.batch_first and not layer.norm_first and layer.self_attn.in_proj_bias is not None
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=fused)
        self.head = nn.Linear(WIDTH, 3)

    def embed(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[self.axis])
        return self.tokens(ids) + self.positions(places if self.axis else places[:, None])  # type: ignore[no-any-return]

    @property
    def axis(self) -> int:
        """Where the positions are."""
        return int(self.encoder.layers[0].self_attn.batch_first)

    def forward(
        self, ids: Tensor, padding_mask: Tensor | None = None, mask: Tensor | None = None, is_causal: bool | None = None
    ) -> Tensor:
        hidden = self.encoder(self.embed(ids), mask, padding_mask, is_causal)
        return self.head(hidden.mean(self.axis))  # type: ignore[no-any-return]


class Pooled(Classifier):
    """Reads the mean over the real positions, through a norm, so that an example's output is its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, padding_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        hidden = self.encoder(self.embed(ids), src_key_padding_mask=padding_mask)
        hidden = self.norm(hidden if self.axis else hidden.transpose(0, 1))
        real = hidden.new_ones(hidden.shape[:2]) if padding_mask is None else (~padding_mask).to(hidden)
        return self.head((real[..., None] * hidden).sum(1) / real.sum(1, keepdim=True))  # type: ignore[no-any-return]


class Translator(nn.Module):
    """The model of the translation tutorial, with its argument names."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 3, HIDDEN, **options)
        self.generator = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self,
        src: Tensor,
        trg: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        src_padding_mask: Tensor | None = None,
        tgt_padding_mask: Tensor | None = None,
    ) -> Tensor:
        masks = (src_mask, tgt_mask, None, src_padding_mask, tgt_padding_mask, src_padding_mask)
        return self.generator(self.transformer(self.source(src), self.target(trg), *masks))  # type: ignore[no-any-return]


class VisionBlock(nn.Module):
    """A pre-norm layer that calls its attention itself."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(0.1), nn.Linear(HIDDEN, WIDTH))

    def forward(self, stream: Tensor) -> Tensor:
        x = self.ln_1(stream)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = self.dropout(x) + stream
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class Vision(nn.Module):
    """A vision transformer with a class token, over (B, 3, 8, 8)."""

    def __init__(self, block: Callable[[], nn.Module] = VisionBlock) -> None:
        super().__init__()
        self.patches = nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), nn.BatchNorm2d(WIDTH))
        self.class_token, self.positions = (nn.Parameter(torch.zeros(1, count, WIDTH)) for count in (1, 5))
        self.layers = nn.Sequential(block(), block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patches(pixels).flatten(2).transpose(1, 2)
        stream = torch.cat([self.class_token.expand(len(pixels), -1, -1), patches], 1) + self.positions
        return self.head(self.norm(self.layers(stream))[:, 0])  # type: ignore[no-any-return]


class PlacedBlock(nn.Module):
    """A post-norm layer, over (S, B, D), that adds positions to queries and keys but not to values."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.places = nn.MultiheadAttention(WIDTH, HEADS), nn.Parameter(torch.zeros(LONGEST, 1, WIDTH))
        self.norm1, self.norm2, self.linear = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        placed = stream + self.places[: len(stream)]
        stream = self.norm1(stream + self.attention(placed, placed, stream)[0])
        return self.norm2(stream + self.linear(stream))  # type: ignore[no-any-return]


class CrossBlock(nn.Module):
    """A post-norm decoder layer of one's own, which reads a memory of other widths for keys and for values."""

    def __init__(self, keys: int, values: int) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(WIDTH, HEADS, kdim=keys, vdim=values, batch_first=True)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, stream: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        stream = self.norm1(stream + self.self_attn(stream, stream, stream)[0])
        stream = self.norm2(stream + self.cross_attn(stream, keys, values)[0])
        return self.norm3(stream + self.linear(stream))  # type: ignore[no-any-return]


def randomized(model: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The model in ``eval()`` with every parameter, biases and gains included, away from its default."""
    return classifiers.randomized(model, seed, dtype, 0.2)


def ids(*shape: int, seed: int = 0) -> Tensor:
    """Random token ids, none of them padding."""
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def padding(*lengths: int) -> Tensor:
    """True at padding: (B, S) for examples of these lengths."""
    return torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]


def causal(length: int) -> Tensor:
    """True where no attention is."""
    return torch.ones(length, length).triu(1).bool()


def places(model: nn.Module) -> dict[str, list[tuple[Any, Any, nn.Module, str]]]:
    """Of each stack's attention modules: module, final norm, and at whose which end the residual stream passes."""
    found: dict[str, list[tuple[Any, Any, nn.Module, str]]] = {"encoder": [], "decoder": [], "cross": []}
    for layer in model.modules():
        match layer:
            case nn.TransformerEncoderLayer():
                norm = None if layer.norm_first else layer.norm1
                found["encoder"].append((layer.self_attn, norm, layer, "input"))
            case nn.TransformerDecoderLayer():
                norms = (None, None) if layer.norm_first else (layer.norm1, layer.norm2)
                between = (layer.norm2, "input") if layer.norm_first else (layer.norm1, "output")
                found["decoder"].append((layer.self_attn, norms[0], layer, "input"))
                found["cross"].append((layer.multihead_attn, norms[1], *between))
            case VisionBlock():
                found["encoder"].append((layer.self_attention, None, layer, "input"))
            case PlacedBlock():
                found["encoder"].append((layer.attention, layer.norm1, layer, "input"))
            case CrossBlock():
                found["decoder"].append((layer.self_attn, layer.norm1, layer, "input"))
                found["cross"].append((layer.cross_attn, layer.norm2, layer.norm1, "output"))
    return {stack: parts for stack, parts in found.items() if parts}


@torch.no_grad()
def oracle(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, list[Layer]]:
    """Each stack's layers in float64, by the attention weights that the modules themselves return."""
    with ExitStack() as context, unfused():
        watches = {stack: [_Watch(context, *parts) for parts in found] for stack, found in places(model).items()}
        model(*args, **kwargs)
    return {stack: [watch.layer() for watch in found] for stack, found in watches.items()}


@contextmanager
def unfused() -> Iterator[None]:
    """No operation of whole layers, whose results for padded queries are others."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _Watch:
    """One attention module's calls, and the residual stream beside it."""

    def __init__(self, stack: ExitStack, attention: Any, norm: Any, beside: nn.Module, end: str) -> None:
        self.attention, self.norm, self.weights = attention, norm, cast(Any, None)
        self.stream = stack.enter_context(watched(beside, {"": ("", end)}))[""]
        stack.callback(attention.register_forward_hook(self.at_attention, with_kwargs=True).remove)

    def batch_first(self, sequence: Tensor) -> Tensor:
        return (sequence if self.attention.batch_first else sequence.transpose(0, 1)).double()

    def at_attention(self, attention: Any, args: Any, given: dict[str, Any], _: Any) -> None:
        options = {"need_weights": True, "average_attn_weights": False}
        _, self.weights = nn.MultiheadAttention.forward(attention, *args, **given | options)
        matrix = attention.v_proj_weight if attention.in_proj_weight is None else attention.in_proj_weight[2 * WIDTH :]
        bias = None if attention.in_proj_bias is None else attention.in_proj_bias[2 * WIDTH :]
        values = F.linear(args[2], matrix, bias)
        self.values = self.batch_first(values).unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def layer(self) -> Layer:
        residual = self.batch_first(self.stream[0])
        return plain_layer(self.weights, self.values, self.attention.out_proj, residual, self.norm)
