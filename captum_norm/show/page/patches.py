"""The page of pictures: scores of their patches over them, and the maps behind the scores."""

import io
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from captum_norm.errors import InvalidInputError
from captum_norm.results.maps import AttributionMaps, Patches
from captum_norm.show.page.document import Example, Maps, Picture, Scores, Tokens
from captum_norm.show.page.html import Page, render
from captum_norm.show.pictures import pixels_of

_MOST_PIXELS = 800
"""Of a side: larger pictures are thinned out."""


def render_patches(
    pictures: Sequence[Any],
    scores: Tensor,
    patches: Sequence[Patches],
    *,
    maps: AttributionMaps | None = None,
    tokens: Sequence[Sequence[str]] | None = None,
    method: str = "method",
    unit: str = "score",
    title: str = "What each patch contributes",
) -> str:
    """Render pictures under the scores of their patches, with the words beside them, as one page.

    Args:
        pictures: each picture as :func:`captum_norm.show.draw_patches` takes it, in the order of the inputs.
        scores: a score for each position of each example, (B, S), as ``attribute`` returns.
        patches: where the patches of each picture stand, such as :attr:`captum_norm.AttributionMaps.patches`.
        maps: the maps of the only self-attention stack, to show the row of each patch and word; None for scores alone.
        tokens: the text of each position of each example; None for that of ``maps``, or its number.
        method: the method's name.
        unit: what the scores are.
        title: the page's heading.

    Returns:
        A complete HTML document, for :func:`captum_norm.show.write_page`.

    Raises:
        InvalidInputError: there are no patches, no picture for some, or scores or tokens of other lengths.

    Example:
        >>> import torch
        >>> where = Patches(example=0, picture=0, positions=torch.tensor([[1, 2], [3, 4]]))
        >>> page = render_patches([torch.rand(3, 8, 8)], torch.rand(1, 5), [where], tokens=[["[CLS]", *"abcd"]])
        >>> "patch 2, 1" in page
        True
    """
    return render(patches_page(pictures, scores, patches, maps, tokens, method, unit, title))


def patches_page(
    pictures: Sequence[Any],
    scores: Tensor,
    patches: Sequence[Patches],
    maps: AttributionMaps | None,
    tokens: Sequence[Sequence[str]] | None,
    method: str,
    unit: str,
    title: str,
) -> Page:
    """Collect the pictures of each example, its scores and maps; see :func:`render_patches`."""
    if not patches or max(one.picture for one in patches) >= len(pictures):
        raise InvalidInputError(
            f"got {len(pictures)} pictures and the patches of {len(patches)}; expected a picture for each, in the "
            "order of the inputs"
        )
    texts = maps.tokens if tokens is None and maps is not None else tokens
    return Page(
        title,
        examples=[
            _example(
                example,
                [one for one in patches if one.example == example],
                [pictures[one.picture] for one in patches if one.example == example],
                scores,
                maps,
                texts,
                method,
                unit,
            )
            for example in sorted({one.example for one in patches})
        ],
    )


def _example(
    example: int,
    patches: Sequence[Patches],
    pictures: Sequence[Any],
    scores: Tensor,
    maps: AttributionMaps | None,
    tokens: Sequence[Sequence[str]] | None,
    method: str,
    unit: str,
) -> Example:
    for one in patches:
        one.scores(scores)  # refuses scores of other inputs
    names = [str(position) for position in range(scores.shape[1])] if tokens is None else list(tokens[example])
    if len(names) != scores.shape[1]:
        raise InvalidInputError(f"got {len(names)} tokens and scores of {scores.shape[1]} positions; give one for each")
    for number, one in enumerate(patches, 1):
        which = f"picture {number}, " if len(patches) > 1 else ""
        for row, line in enumerate(one.positions.tolist(), 1):
            for column, position in enumerate(line, 1):
                names[position] = f"{which}patch {row}, {column}"
    stack = None if maps is None else maps.self_attention[example]
    values = scores[example]
    return Example(
        f"example {example}",
        Tokens(names),
        scores=[Scores(method, unit, values, bool((values < 0).any()))],
        maps=[] if stack is None else [Maps(method, "entry", stack, range(len(stack)), signed=bool((stack < 0).any()))],
        pictures=[
            Picture(_png(picture), one.positions.tolist()) for picture, one in zip(pictures, patches, strict=True)
        ],
    )


def _png(picture: Any) -> bytes:
    from matplotlib.image import imsave

    pixels = pixels_of(picture)
    step = -(-max(pixels.shape[:2]) // _MOST_PIXELS)
    buffer = io.BytesIO()
    imsave(buffer, pixels[::step, ::step], format="png", metadata={"Software": ""})
    return buffer.getvalue()
