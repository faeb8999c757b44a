"""Alignments with their words: parts, word pairs, tables, and the file."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from alignment import Alignment, Alignments
from captum_norm import InvalidInputError

SOURCES = [["la", "maison", "bleue"], ["la", "mer"], []]
TARGETS = [["the", "blue", "house"], ["the", "sea"], ["."]]


@pytest.fixture
def alignments() -> Alignments:
    return Alignments([[(0, 0), (1, 2), (2, 1)], [(1, 1), (0, 0)], []], SOURCES, TARGETS)


def test_a_pair_is_its_links_and_a_slice_has_the_words(alignments: Alignments) -> None:
    assert alignments[0] == Alignment([(0, 0), (1, 2), (2, 1)])
    assert alignments[1:] == Alignments([[(0, 0), (1, 1)], []], SOURCES[1:], TARGETS[1:])
    assert alignments[-1:].targets == [["."]]
    assert alignments[::2].sources == [SOURCES[0], []]
    with pytest.raises(IndexError):
        alignments[3]


def test_words_count_in_equality(alignments: Alignments) -> None:
    assert alignments == Alignments(list(alignments), SOURCES, TARGETS)
    assert alignments != Alignments(list(alignments), SOURCES, [["the", "blue", "home"], *TARGETS[1:]])
    assert alignments != Alignments([[], *alignments[1:]], SOURCES, TARGETS)
    assert alignments == list(alignments)  # which has no words
    assert alignments != [Alignment()] * 3


def test_word_pairs_are_counted(alignments: Alignments) -> None:
    assert alignments.top(2) == [(("la", "the"), 2), (("maison", "house"), 1)]
    assert dict(alignments.top()) == {
        ("la", "the"): 2,
        ("maison", "house"): 1,
        ("bleue", "blue"): 1,
        ("mer", "sea"): 1,
    }
    assert alignments.words() is alignments
    with pytest.raises(InvalidInputError, match="got count=0; expected at least 1"):
        alignments.top(0)


def test_a_labelled_array_has_a_row_for_each_target_word(alignments: Alignments) -> None:
    data = alignments.to_xarray()
    assert data["link"].dims == ("pair", "target", "source")
    found = {tuple(place) for place in zip(*(axis.tolist() for axis in data["link"].values.nonzero()), strict=True)}
    assert found == {(0, 0, 0), (0, 2, 1), (0, 1, 2), (1, 0, 0), (1, 1, 1)}
    assert data["source_word"].values.tolist() == [SOURCES[0], ["la", "mer", ""], ["", "", ""]]
    assert data["target_word"].isel(pair=1, target=1).item() == "sea"
    assert Alignments([], [], []).to_xarray()["link"].shape == (0, 0, 0)


def test_a_long_list_is_short_in_a_console(alignments: Alignments) -> None:
    assert repr(alignments[1:]) == "[Alignment([(0, 0), (1, 1)]), Alignment([])]"
    many = Alignments([alignments[0]] * 100, SOURCES[:1] * 100, TARGETS[:1] * 100)
    assert repr(many) == "Alignments(100 sentence pairs, 300 links)"


def test_a_figure_shows_the_links_of_one_pair(alignments: Alignments) -> None:
    (axes,) = (axes for axes in alignments[:1].plot().axes if axes.images)
    assert axes.images[0].get_array().tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]  # type: ignore[union-attr]
    assert [label.get_text() for label in axes.get_xticklabels()] == SOURCES[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == TARGETS[0]
    with pytest.raises(InvalidInputError, match=r"draw those of one that has words: alignments\[:1\]$"):
        alignments.plot()


def test_a_file_holds_links_and_words(alignments: Alignments, tmp_path: Path) -> None:
    path = tmp_path / "links.safetensors"
    assert alignments.save(path) == path
    found = Alignments.load(path)
    assert found == alignments
    assert (found.sources, found.targets) == (alignments.sources, alignments.targets)
    assert [type(one) for one in found] == [Alignment] * 3
    Alignments([], [], []).save(path)
    assert Alignments.load(path) == Alignments([], [], [])
    hostile = Alignments([[(0, 0)]], [["<script>\u202e\x00"]], [["\U0001f600\n"]])
    hostile.save(path)
    assert Alignments.load(path) == hostile


def test_damaged_files_are_one_sentence(
    alignments: Alignments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # messages shorten long paths
    path = Path("links.safetensors")
    alignments.save(path)
    whole = path.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    metadata = json.loads(whole[8 : 8 + size])["__metadata__"]
    content = json.loads(metadata["content"])

    def fails(data: bytes) -> str:
        path.write_bytes(data)
        with pytest.raises(InvalidInputError) as caught:
            Alignments.load(path)
        text = str(caught.value)
        assert text.startswith(f"cannot load {path}: ")
        assert len(text) <= 400
        assert "\n" not in text
        return text

    def changed(**fields: Any) -> bytes:
        return save_tensors(load_tensors(whole), metadata | {"content": json.dumps(content | fields)})

    bad: list[Any] = [
        [[[0, 0]]],  # of one pair alone
        [[[0, 3]], [], []],  # there are three target words
        [[[-1, 0]], [], []],
        [[[0, 0, 0]], [], []],
        [[[0.5, 0]], [], []],
        [[["0", 0]], [], []],
        [[True], [], []],
        {"0": []},
        None,
        [[[10**30, 0]], [], []],
    ]
    for links in bad:
        assert "the file is damaged (" in fails(changed(links=links)), links
    for words in ([["a"]], [["a", 1], [], []], "words", [None] * 3, [[["a"]], [], []]):
        assert "the file is damaged (" in fails(changed(sources=words)), words
    assert "the file is damaged (" in fails(changed(gold=[]))
    other = save_tensors({}, metadata | {"result": "AttributionMaps"})
    assert fails(other).endswith("it holds AttributionMaps; expected Alignments")
