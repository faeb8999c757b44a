"""Finds pictures, and their patches, among the positions of a model, and joins what its towers attend to in chunks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import isqrt, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.models.attention import AttentionCall, AttentionFunction, OwnAttention
from captum_norm.models.hooks import Received, hooked
from captum_norm.models.libraries.library import forward_parameters
from captum_norm.results.maps import Modality, Patches

# The settings that name a modality's token, which the input has once for each position of a picture.
TOKENS: Mapping[Modality, tuple[str, ...]] = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
}
# The arguments with frames, rows and columns of patches of each picture, (pictures, 3), and with the patches in a row.
GRIDS: Mapping[Modality, tuple[str, str]] = {
    "image": ("image_grid_thw", "pixel_values"),
    "video": ("video_grid_thw", "pixel_values_videos"),
}
PIXELS = "pixel_values"
SIZES = "image_sizes"
# The argument with the ends of the chunks of a packed sequence, (chunks + 1,).
CHUNK_ENDS = "cu_seqlens"
# The tokens before the patches, by the configuration's ``model_type``: their numbers, or the settings that have these.
# The patches follow row by row, and nothing follows them.
PREFIXES: Mapping[str, tuple[int | str, ...]] = {
    **dict.fromkeys(("aimv2_vision_model", "ijepa", "siglip_vision_model"), ()),
    **dict.fromkeys(("beit", "data2vec-vision", "dinov2", "dpt", "vit", "vit_msn"), (1,)),
    **dict.fromkeys(("blip_vision_model", "chinese_clip_vision_model", "clip_vision_model"), (1,)),
    **dict.fromkeys(("internvl_vision", "metaclip_2_vision_model", "qianfan_ocr_vision"), (1,)),
    "deit": (1, 1),  # the class and the distillation token
    **dict.fromkeys(("dinov2_with_registers", "dinov3_vit", "sapiens2"), (1, "num_register_tokens")),
    "tipsv2_vision_model": (1, "num_register_tokens"),
    "pixio": ("n_cls_tokens",),
}

Picture = tuple[int, tuple[Tensor, ...]]
"""One picture's positions: their number, and where the patches of each of its grids are among them."""


@dataclass(frozen=True)
class Pictures:
    """What the positions of a batch are; see :class:`captum_norm.AttributionMaps`."""

    modality: Sequence[Sequence[Modality]] | None = None
    patches: Sequence[Patches] = ()
    # For each argument that has all pictures in a row, how many of its entries each example has; None if unknown.
    counts: Mapping[str, Sequence[int]] | None = field(default_factory=dict)
    length: int | None = None  # how many positions there must be for the patches to be right

    def patches_among(self, positions: int) -> Sequence[Patches]:
        """Return the patches in a sequence of so many positions."""
        return self.patches if self.length in (None, positions) else ()


def read_pictures(config: Any, towers: Sequence[str], arguments: Mapping[str, Any], real: Tensor | None) -> Pictures:
    """Find the pictures in a batch of a model with these towers; ``real`` is True at real positions, (B, S)."""
    ids, pixels = arguments.get("input_ids"), arguments.get(PIXELS)
    if not towers:
        return _whole_sequence(config, pixels) if ids is None and isinstance(pixels, Tensor) else Pictures()
    # Mllama's layers attend to the pictures; its sequence has none.
    crosses = getattr(getattr(config, "text_config", None), "cross_attention_layers", None)
    named = ((kind, getattr(config, name, None)) for kind, names in TOKENS.items() for name in reversed(names))
    tokens = {} if crosses else {kind: token for kind, token in named if isinstance(token, int)}
    if not tokens or not isinstance(ids, Tensor):
        return Pictures()
    real = torch.ones_like(ids, dtype=torch.bool) if real is None else real.to(ids.device)
    places = {kind: (ids == token) & real for kind, token in tokens.items()}
    modality: list[list[Modality]] = [["text"] * ids.shape[1] for _ in ids]
    for kind, where in places.items():
        for example, position in where.nonzero().tolist():
            modality[example][position] = kind
    patches, counts, known = list[Patches](), dict[str, Sequence[int]](), True
    for kind, where in places.items():
        pictures = _pictures(kind, config, towers, arguments, int(where.sum()))
        held = None if pictures is None else _split([length for length, _ in pictures], where.sum(1).tolist())
        if pictures is None or held is None:
            known = known and not where.any()
            continue
        patches += _patches(pictures, held, where)
        counts |= _counts(kind, held, arguments)
    if len(ids) == 1:
        names = (PIXELS, SIZES, *(name for names in GRIDS.values() for name in names))
        counts |= {name: [len(value)] for name in names if isinstance(value := arguments.get(name), Tensor)}
        known = True
    return Pictures(modality, patches, counts if known else None)


def _whole_sequence(config: Any, pixels: Tensor) -> Pictures:
    """Find the patches in the sequence of a vision model that reads one picture, (B, channels, height, width)."""
    # A classifier of CLIP's pictures has the configuration of both towers.
    configs = (config, getattr(config, "vision_config", None))
    vision = next((tower for tower in configs if getattr(tower, "model_type", None) in PREFIXES), None)
    if vision is None or pixels.dim() != 4:
        return Pictures()
    before = sum(part if isinstance(part, int) else getattr(vision, part) for part in PREFIXES[vision.model_type])
    side = vision.patch_size
    sides = (side, side) if isinstance(side, int) else side
    rows, columns = (length // step for length, step in zip(pixels.shape[-2:], sides, strict=True))
    grid = _grid(rows, columns, before)
    return Pictures(patches=[Patches(i, i, grid) for i in range(len(pixels))], length=before + rows * columns)


def _pictures(
    kind: Modality, config: Any, towers: Sequence[str], arguments: Mapping[str, Any], count: int
) -> list[Picture] | None:
    """Return the pictures of a batch with ``count`` positions of pictures in all; None if their sizes are unknown."""
    vision = getattr(config, "vision_config", None)
    if kind in GRIDS and isinstance(arguments.get(GRIDS[kind][0]), Tensor):
        merged = getattr(vision, "spatial_merge_size", 1)
        sizes = arguments[GRIDS[kind][0]].tolist()
        return [_frames(frames, height // merged, width // merged) for frames, height, width in sizes]
    pixels = arguments.get(PIXELS)
    if kind != "image" or not isinstance(pixels, Tensor) or pixels.dim() not in (4, 5):
        return None
    if isinstance(arguments.get(SIZES), Tensor):
        sizes = arguments[SIZES].tolist()
        if getattr(config, "image_grid_pinpoints", None):
            return _tiled(config, sizes, count)
        side, merged = getattr(vision, "patch_size", 1), getattr(config, "spatial_merge_size", 1)
        return [_frames(1, height // side // merged, width // side // merged) for height, width in sizes]
    # Pictures of zeros are padding.
    shown = len(pixels) if pixels.dim() == 4 else int(pixels.flatten(0, 1).flatten(1).any(1).sum())
    if not shown or count % shown:
        return None
    length, (height, width) = count // shown, pixels.shape[-2:]
    rows = isqrt(length * height // width)
    columns = rows * width // height
    resampled = any(name not in ("vision", "audio") for name in towers)
    grids = () if resampled or rows * columns != length else (_grid(rows, columns),)
    return [(length, grids)] * shown


def _grid(rows: int, columns: int, start: int = 0, gap: int = 0) -> Tensor:
    """Return indices of patches that stand row by row, with a gap behind each row."""
    steps = torch.arange(rows, device="cpu")[:, None] * (columns + gap)
    return start + steps + torch.arange(columns, device="cpu")


def _frames(frames: int, rows: int, columns: int) -> Picture:
    grids = (_grid(rows, columns, frame * rows * columns) for frame in range(frames))
    return frames * rows * columns, tuple(grids)


def _tiled(config: Any, sizes: Sequence[tuple[int, int]], count: int) -> list[Picture] | None:
    """Return pictures seen as a whole and in tiles, as LLaVA-NeXT cuts them, or all of them as a whole only."""
    vision = config.vision_config
    side = vision.image_size // vision.patch_size
    overview: Picture = side * side + 1, (_grid(side, side),)
    tiled: list[Picture] = []
    for height, width in sizes:
        rows, columns = _tile_patches(config, height, width, side)
        # The whole comes first, then the rows of all tiles together, each followed by a position for the new line.
        grids = (_grid(side, side), _grid(rows, columns, side * side, 1))
        tiled.append((side * side + rows * (columns + 1), grids))
    options = (tiled, [overview] * len(sizes))
    return next((pictures for pictures in options if sum(length for length, _ in pictures) == count), None)


def _tile_patches(config: Any, height: int, width: int, side: int) -> tuple[int, int]:
    """Return rows and columns of patches of all tiles of a picture, without those that are padding."""
    from transformers.image_processing_utils import select_best_resolution  # these are slow to import
    from transformers.models.llava_next.modeling_llava_next import unpad_image

    fitting = select_best_resolution((height, width), config.image_grid_pinpoints)
    shape = [side * (length // config.vision_config.image_size) for length in fitting]
    whole = torch.empty(1, *shape, device="meta")
    rows, columns = unpad_image(whole, (height, width)).shape[1:]  # type: ignore[no-untyped-call]
    most = getattr(config, "vision_aspect_ratio", None)
    if most is not None:  # LLaVA-OneVision makes what has more patches smaller
        ratio = sqrt(rows * columns / (int(most.removeprefix("anyres_max_")) * side**2))
        if ratio > 1.1:
            return int(rows // ratio), int(columns // ratio)
    return rows, columns


def _split(lengths: Sequence[int], counts: Sequence[int]) -> list[int] | None:
    """Return how many of the pictures, in their order, each example has; None if they do not fit."""
    ends = list(accumulate(lengths, initial=0))
    places = [ends.index(end) for end in accumulate(counts, initial=0) if end in ends]
    fits = len(places) == len(counts) + 1 and places[-1] == len(lengths)
    return [end - start for start, end in pairwise(places)] if fits else None


def _patches(pictures: Sequence[Picture], held: Sequence[int], where: Tensor) -> Iterator[Patches]:
    index = 0
    for example, count in enumerate(held):
        places, start = where[example].nonzero().flatten().cpu(), 0
        for length, grids in pictures[index : index + count]:
            yield from (Patches(example, index, places[start : start + length][grid]) for grid in grids)
            index, start = index + 1, start + length


def _counts(kind: Modality, held: Sequence[int], arguments: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """Return how many entries of each argument with all pictures of a batch in a row each example has."""
    counts: dict[str, Sequence[int]] = {}
    if kind in GRIDS and isinstance(arguments.get(GRIDS[kind][0]), Tensor):
        grid, patches = GRIDS[kind]
        sizes = arguments[grid].prod(1).split(list(held))
        counts[grid] = held
        if isinstance(arguments.get(patches), Tensor):
            counts[patches] = [int(size.sum()) for size in sizes]
    elif kind == "image" and (arguments[PIXELS].dim() == 4 or SIZES in arguments):
        counts |= {name: held for name in (PIXELS, SIZES) if isinstance(arguments.get(name), Tensor)}
    return counts


def of_examples(value: Tensor, counts: Sequence[int], examples: Sequence[int]) -> Tensor:
    """Return the entries of some examples in an argument that has all pictures of a batch in a row."""
    parts = value.split(list(counts))
    return torch.cat([parts[example] for example in examples])


@contextmanager
def gathering_chunks(towers: Iterable[nn.Module], function: AttentionFunction) -> Iterator[AttentionFunction]:
    """Make an attention function that calls ``function`` once for all chunks, whose outputs it fills in at the last."""
    counts: dict[nn.Module, int] = {}
    waiting: dict[nn.Module, list[tuple[AttentionCall, Tensor]]] = {}

    def begin(module: nn.Module, received: Received) -> None:
        args, kwargs = received
        ends = (kwargs | dict(zip(forward_parameters(module), args, strict=False))).get(CHUNK_ENDS)
        counts[module] = len(ends) - 1 if isinstance(ends, Tensor) else 1
        waiting[module] = []

    def attend(call: AttentionCall) -> Tensor:
        if counts.get(call.module, 1) == 1:
            return function(call)
        # The backward pass may need the model's own tensor.
        output = call.output().clone() if torch.is_grad_enabled() else call.output()
        chunks = waiting[call.module]
        chunks.append((call, output))
        if len(chunks) == counts[call.module]:
            made = function(_joined(chunks))
            if torch.is_grad_enabled():  # what it returns may have another graph than the model's own
                sizes = [each.shape[1] for _, each in chunks]
                for (_, each), piece in zip(chunks, made.split(sizes, dim=1), strict=True):
                    each.copy_(piece)
        return output

    modules = (module for tower in towers for module in tower.modules())
    packed = (module for module in modules if CHUNK_ENDS in forward_parameters(module))
    with hooked((module, "arguments", begin) for module in packed):
        yield attend


def _joined(chunks: list[tuple[AttentionCall, Tensor]]) -> AttentionCall:
    """One call over all chunks, each of which attends to itself."""
    calls = [call for call, _ in chunks]
    query, key, value = (torch.cat([getattr(call, name) for call in calls], 2) for name in ("query", "key", "value"))
    sizes = torch.tensor([call.query.shape[2] for call in calls])
    chunk = torch.arange(len(sizes)).repeat_interleave(sizes).to(query.device)

    def mask(rows: slice) -> Tensor:
        apart = chunk[rows].unsqueeze(1) != chunk
        return query.new_zeros(apart.shape).masked_fill(apart, torch.finfo(query.dtype).min)[None, None]

    own = OwnAttention(lambda: (torch.cat([output for _, output in chunks], 1), None), mask)
    return replace(calls[0], query=query, key=key, value=value, own=own)
