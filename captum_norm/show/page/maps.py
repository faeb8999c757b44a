"""Maps and measurements as pages: an example for each text, or for each stack of an encoder–decoder model."""

from collections.abc import Sequence
from itertools import groupby

from captum_norm.attr.measurements import Measurements
from captum_norm.results import make_page
from captum_norm.results.maps import AttributionMaps
from captum_norm.results.stacks import MapStack
from captum_norm.show.page.document import Example, Maps
from captum_norm.show.page.html import Page
from captum_norm.show.page.tokens import tokens_of
from captum_norm.show.text import shortened
from captum_norm.text.words import words_of_tokens


@make_page.register
def maps_page(maps: AttributionMaps) -> Page:
    """Make a page of the maps of every example."""
    return Page("Maps of all layers", facts={"maps": repr(maps)}, examples=stack_examples(maps.stacks()))


@make_page.register
def measurements_page(measured: Measurements) -> Page:
    """Make a page of the maps of everything that was measured."""
    return Page("Measured maps", facts={"measured": repr(measured)}, examples=stack_examples(measured.stacks()))


def stack_examples(stacks: Sequence[MapStack]) -> list[Example]:
    """Make the examples of a page: stacks with the same rows and columns are shown side by side."""
    examples = []
    groups = [list(group) for _, group in groupby(stacks, lambda stack: stack.side)]
    for group in groups:
        for example in range(len(group[0].values)):
            columns, rows = (tokens_of(words_of_tokens(names)) for names in _names(group[0], example))
            title = (
                shortened(" ".join(columns.word_texts or []), 60) if len(groups) == 1 else f"{group[0].name} {example}"
            )
            examples.append(
                Example(
                    title,
                    columns,
                    None if columns.texts == rows.texts else rows,
                    maps=[_maps(stack, example) for stack in group],
                )
            )
    return examples


def _maps(stack: MapStack, example: int) -> Maps:
    # A page has every layer once, in the model's order.
    place = {layer: index for index, layer in enumerate(stack.layers)}
    layers = sorted(place)
    values = stack.of(example)[[place[layer] for layer in layers]]
    return Maps(stack.name, stack.unit, values, layers, signed=bool((values < 0).any()))


def _names(stack: MapStack, example: int) -> tuple[list[str], list[str]]:
    return stack.columns(example), stack.rows(example)
