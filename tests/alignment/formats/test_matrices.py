"""Files of arrays: what they hold, by the lines that they are made of."""

import io
import json
from typing import Any

import numpy as np
import pytest

from alignment.formats import Output
from alignment.links import Alignment, ScoredAlignment, calibrated

OUTPUT = Output("npz", min_score=0.5)


def found(seed: int) -> list[ScoredAlignment | None]:
    """Alignments of all sizes, and lines without one."""
    generator = np.random.default_rng(seed)
    alignments: list[ScoredAlignment | None] = [None]
    for number in range(7):
        probabilities = generator.random(generator.integers(1, 6, 2))
        links = Alignment((s, t) for t, s in np.argwhere(probabilities > 0.4).tolist())
        alignments += [ScoredAlignment(links, probabilities, bool(number % 2)), *([None] if number == 3 else [])]
    return alignments


def written(alignments: list[ScoredAlignment | None], lines_a_part: int) -> bytes:
    texts = []
    for number, one in enumerate(alignments, 1):
        if one is None:
            texts.append(OUTPUT.nothing())
        else:
            assert one.probabilities is not None
            target, source = (["w"] * size for size in one.probabilities.shape)
            texts.append(OUTPUT.text(number, source, target, one.at_least(OUTPUT.min_score)))
    starts = range(0, len(texts), lines_a_part)
    file = io.BytesIO()
    OUTPUT.write(file, ".npz", ("".join(texts[start : start + lines_a_part]).encode() for start in starts))
    return file.getvalue()


@pytest.mark.parametrize("seed", range(4))
def test_arrays_hold_what_alignments_do(seed: int) -> None:
    alignments = found(seed)
    content = written(alignments, 3)
    assert content == written(alignments, 100)
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays: dict[str, Any] = dict(file)
    assert set(arrays) == {"shapes", "probabilities", "links", "scores", "corpus_statistics"}
    assert arrays["probabilities"].dtype == arrays["scores"].dtype == np.float32
    ends = np.cumsum(arrays["shapes"].prod(1))
    links, scores = arrays["links"], arrays["scores"]
    for line, (one, shape, matrix) in enumerate(
        zip(alignments, arrays["shapes"], np.split(arrays["probabilities"], ends[:-1]), strict=True)
    ):
        here = {tuple(link): score for (at, *link), score in zip(links.tolist(), scores, strict=True) if at == line}
        if one is None:
            assert (shape.tolist(), matrix.size, here) == ([0, 0], 0, {})
            assert not arrays["corpus_statistics"][line]
            continue
        assert one.probabilities is not None
        assert np.array_equal(matrix.reshape(shape), one.probabilities.astype(np.float32))
        right = {(s, t): calibrated(one.probabilities[t, s]) for s, t in one.links}
        right = {link: score for link, score in right.items() if score >= 0.5}
        assert here == pytest.approx(right, rel=1e-6)
        assert arrays["corpus_statistics"][line] == one.corpus_statistics
    assert ends[-1] == arrays["probabilities"].size


def test_nothing_is_a_file_of_empty_arrays() -> None:
    for lines in (0, 2):
        with np.load(io.BytesIO(written([None] * lines, 1))) as file:
            shapes = {name: array.shape for name, array in file.items()}
        assert shapes == {
            "shapes": (lines, 2),
            "probabilities": (0,),
            "links": (0, 3),
            "scores": (0,),
            "corpus_statistics": (lines,),
        }


def test_a_line_is_json() -> None:
    one = ScoredAlignment(Alignment([(0, 0)]), np.array([[0.5, 0.25]]))
    record = json.loads(Output("npz").text(1, ["a", "b"], ["c"], one))
    assert (record["shape"], record["links"]) == ([1, 2], [[0, 0, pytest.approx(0.8022, abs=1e-4)]])
