"""Finds the positions of pictures, and of their patches, in the sequence that a model reads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isqrt, sqrt
from typing import Any

import torch
from torch import Tensor

from captum_norm.models.patch_grids import find_patches
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


@dataclass(frozen=True)
class Pictures:
    """What the positions of a batch are.

    Attributes:
        modality: see :class:`captum_norm.AttributionMaps`.
        patches: see :class:`captum_norm.AttributionMaps`.
        counts: for each argument that has all pictures of the batch in a row, how many of its entries each example
            has; None if that is unknown.
        length: how many positions there must be for the patches to be right; None if the inputs have them.
    """

    modality: Sequence[Sequence[Modality]] | None = None
    patches: Sequence[Patches] = ()
    counts: Mapping[str, Sequence[int]] | None = field(default_factory=dict)
    length: int | None = None

    def patches_among(self, positions: int) -> Sequence[Patches]:
        """The patches in a sequence of so many positions."""
        return self.patches if self.length in (None, positions) else ()


@dataclass(frozen=True)
class _Picture:
    """One picture's positions: their number, and where the patches of each of its grids are among them."""

    length: int
    grids: tuple[Tensor, ...] = ()


def read_pictures(config: Any, towers: Sequence[str], arguments: Mapping[str, Any], real: Tensor | None) -> Pictures:
    """Find the pictures in a batch.

    Args:
        config: the model's configuration, which names the tokens that stand for pictures.
        towers: names of the model's towers. Behind any but those of vision and sound, positions are no patches.
        arguments: the model's arguments.
        real: True at real positions, (B, S); None if all are.
    """
    ids = arguments.get("input_ids")
    # Mllama's layers attend to the pictures; its sequence has none.
    crosses = getattr(getattr(config, "text_config", None), "cross_attention_layers", None)
    tokens = {} if crosses else {kind: token for kind in TOKENS if (token := _token(config, kind)) is not None}
    pixels = arguments.get(PIXELS)
    if not towers and ids is None and isinstance(pixels, Tensor) and (found := find_patches(config, pixels)):
        return Pictures(patches=found[0], length=found[1])
    if not tokens or not isinstance(ids, Tensor) or not towers:
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
        held = None if pictures is None else _split([picture.length for picture in pictures], where.sum(1).tolist())
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


def _token(config: Any, kind: Modality) -> int | None:
    return next((token for name in TOKENS[kind] if isinstance(token := getattr(config, name, None), int)), None)


def _pictures(
    kind: Modality, config: Any, towers: Sequence[str], arguments: Mapping[str, Any], count: int
) -> list[_Picture] | None:
    """The pictures of a batch with ``count`` positions of pictures in all; None if their sizes are unknown."""
    vision = getattr(config, "vision_config", None)
    if kind in GRIDS and isinstance(arguments.get(GRIDS[kind][0]), Tensor):
        merged = getattr(vision, "spatial_merge_size", 1)
        sizes = arguments[GRIDS[kind][0]].tolist()
        return [_frames(frames, height, width, merged) for frames, height, width in sizes]
    pixels = arguments.get(PIXELS)
    if kind != "image" or not isinstance(pixels, Tensor) or pixels.dim() not in (4, 5):
        return None
    if isinstance(arguments.get(SIZES), Tensor):
        sizes = arguments[SIZES].tolist()
        if getattr(config, "image_grid_pinpoints", None):
            return _tiled(config, sizes, count)
        side = getattr(vision, "patch_size", 1)
        merged = getattr(config, "spatial_merge_size", 1)
        return [_frames(1, height // side, width // side, merged) for height, width in sizes]
    # Pictures of zeros are padding.
    shown = len(pixels) if pixels.dim() == 4 else int(pixels.flatten(0, 1).flatten(1).any(1).sum())
    if not shown or count % shown:
        return None
    rows, columns = _rows_and_columns(count // shown, *pixels.shape[-2:])
    resampled = any(name not in ("vision", "audio") for name in towers)
    grids = () if resampled or rows * columns != count // shown else (_grid(rows, columns),)
    return [_Picture(count // shown, grids)] * shown


def _rows_and_columns(count: int, height: int, width: int) -> tuple[int, int]:
    rows = isqrt(count * height // width)
    return rows, rows * width // height


def _grid(rows: int, columns: int, start: int = 0, gap: int = 0) -> Tensor:
    """Indices of patches that stand row by row, with a gap behind each row."""
    steps = torch.arange(rows, device="cpu")[:, None] * (columns + gap)
    return start + steps + torch.arange(columns, device="cpu")


def _frames(frames: int, height: int, width: int, merged: int) -> _Picture:
    rows, columns = height // merged, width // merged
    grids = (_grid(rows, columns, frame * rows * columns) for frame in range(frames))
    return _Picture(frames * rows * columns, tuple(grids))


def _tiled(config: Any, sizes: Sequence[tuple[int, int]], count: int) -> list[_Picture] | None:
    """Pictures seen as a whole and in tiles, as LLaVA-NeXT cuts them, or all of them as a whole only.

    The whole comes first, then the rows of all tiles together, without the rows and columns that only pad the picture
    to the shape of the tiles, each followed by a position for the new line.
    """
    vision = config.vision_config
    side = vision.image_size // vision.patch_size
    whole = _Picture(side * side + 1, (_grid(side, side),))
    tiled = []
    for height, width in sizes:
        rows, columns = _tile_patches(config, height, width, side)
        grids = (_grid(side, side), _grid(rows, columns, side * side, 1))
        tiled.append(_Picture(side * side + rows * (columns + 1), grids))
    options = (tiled, [whole] * len(sizes))
    return next((found for found in options if sum(picture.length for picture in found) == count), None)


def _tile_patches(config: Any, height: int, width: int, side: int) -> tuple[int, int]:
    """Rows and columns of patches of all tiles of a picture, without those that are padding."""
    fitting = max(config.image_grid_pinpoints, key=lambda size: _fit(height, width, *size))
    rows, columns = (side * (length // config.vision_config.image_size) for length in fitting)
    if width / height > columns / rows:
        rows -= 2 * ((rows - int(round(height * columns / width, 7))) // 2)
    else:
        columns -= 2 * ((columns - int(round(width * rows / height, 7))) // 2)
    most = getattr(config, "vision_aspect_ratio", None)
    if most is not None:  # LLaVA-OneVision makes what has more patches smaller
        ratio = sqrt(rows * columns / (int(most.removeprefix("anyres_max_")) * side**2))
        if ratio > 1.1:
            return int(rows // ratio), int(columns // ratio)
    return rows, columns


def _fit(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """How many pixels of a picture a shape keeps, and, negative, how many it wastes."""
    scale = min(columns / width, rows / height)
    kept = min(int(width * scale) * int(height * scale), width * height)
    return kept, kept - rows * columns


def _split(lengths: Sequence[int], counts: Sequence[int]) -> list[int] | None:
    """How many of the pictures, in their order, each example has; None if they do not fit."""
    held, start = [], 0
    for count in counts:
        end, left = start, count
        while left > 0 and end < len(lengths):
            left -= lengths[end]
            end += 1
        if left:
            return None
        held.append(end - start)
        start = end
    return held if start == len(lengths) else None


def _patches(pictures: Sequence[_Picture], held: Sequence[int], where: Tensor) -> Iterator[Patches]:
    index = 0
    for example, count in enumerate(held):
        places, start = where[example].nonzero().flatten().cpu(), 0
        for picture in pictures[index : index + count]:
            own = places[start : start + picture.length]
            yield from (Patches(example, index, own[grid]) for grid in picture.grids)
            index, start = index + 1, start + picture.length


def _counts(kind: Modality, held: Sequence[int], arguments: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """How many entries of each argument with all pictures of a batch in a row each example has."""
    counts: dict[str, Sequence[int]] = {}
    if kind in GRIDS and isinstance(arguments.get(GRIDS[kind][0]), Tensor):
        grid, patches = GRIDS[kind]
        sizes = arguments[grid].prod(1).split(list(held))
        counts[grid] = held
        if isinstance(arguments.get(patches), Tensor):
            counts[patches] = [int(own.sum()) for own in sizes]
    elif kind == "image" and (arguments[PIXELS].dim() == 4 or SIZES in arguments):
        counts |= {name: held for name in (PIXELS, SIZES) if isinstance(arguments.get(name), Tensor)}
    return counts


def of_examples(value: Tensor, counts: Sequence[int], examples: Sequence[int]) -> Tensor:
    """The entries of some examples in an argument that has all pictures of a batch in a row."""
    parts = value.split(list(counts))
    return torch.cat([parts[example] for example in examples])
