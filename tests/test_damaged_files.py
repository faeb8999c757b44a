"""Every reader of a file, on thousands of damaged ones: it reads, or says in one sentence what is wrong.

No other exception, no crash, no hang, no excessive memory; and what was read can be written and is read the same.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alignment.fairseq.conversion import build_model
from captum_norm import InvalidInputError
from tests.alignment.fairseq.small import settings, weights
from tests.fuzzing import FACTOR, bounded, damaged, limited, put
from tests.readers import COUNT, READERS, compared

pytestmark = pytest.mark.fuzz

LONGEST_MESSAGE = 1000


@pytest.mark.few
@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_file_is_read_or_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    reader = READERS[kind](tmp_path)
    path, again = tmp_path / reader.name, tmp_path / "again" / reader.name
    again.parent.mkdir()
    same = compared if "checkpoint" in kind else lambda found: found
    read = refused = 0
    for content in reader.files:
        path.write_bytes(content)
        reader.read(path)
    with bounded():
        for content in damaged(reader.files, reader.cases):
            put(path, content)
            with noted(content):
                try:
                    with limited():
                        found = reader.read(path)
                except InvalidInputError as error:
                    refused += 1
                    check(str(error), path)
                    continue
                read += 1
                if reader.written is not None:
                    put(again, reader.written(found))
                    assert same(reader.read(again)) == same(found)
    assert read + refused == reader.cases * FACTOR
    assert min(read, refused) >= reader.cases * FACTOR // 200, (read, refused)


@contextmanager
def noted(content: bytes) -> Iterator[None]:
    """Add the content that was read to a failure."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"reading {content[:3000]!r}")
        raise


def check(message: str, path: Path | None = None) -> None:
    """A message is a short line of printable characters that names the file."""
    assert path is None or path.name in message or str(path.parent) in message, message
    assert message.isprintable(), message
    assert len(message) <= LONGEST_MESSAGE, message


ODD: list[Any] = [
    None, True, -1, 0, 3, 10**30, 0.5, float("nan"), float("inf"), "", "x", "4", "9" * 5000, "a/b", "\0", "\x1b[31m",
    [], [1], {}, {"a": 1}, "x" * 300,
]  # fmt: skip


def odd_tensor(draw: random.Random, tensor: Tensor) -> Tensor:
    match draw.randrange(6):
        case 0:
            return tensor.flatten()
        case 1:
            return tensor[:0]
        case 2:
            return torch.tensor(1.0)
        case 3:
            return tensor.long()
        case 4:
            return tensor[:1]
        case _:
            return tensor.to(torch.complex64)


def test_odd_settings_and_weights_make_a_model_or_are_refused_in_one_sentence() -> None:
    """The bytes of the checkpoint are intact, but fairseq would not have written its content."""
    draw = random.Random(0)
    right, tensors = settings(), {pre_norm: weights(pre_norm=pre_norm) for pre_norm in (False, True)}
    learned = weights(learned=True)
    names = [*right, "dropout", "activation_fn", "activation_dropout", "max_source_positions", "no_scale_embedding"]
    made = refused = 0
    with bounded():
        for _ in range(COUNT * FACTOR // 3):
            chosen = right | {name: draw.choice(ODD) for name in draw.sample(names, draw.choice((0, 1, 1, 2)))}
            model = dict(draw.choice([*tensors.values(), learned]))
            for name in draw.sample(sorted(model), draw.choice((0, 0, 1, 2))):
                model[name] = odd_tensor(draw, model[name])
            if draw.random() < 0.2:
                model[f"encoder.layers.{draw.choice((3, 999999999, '9' * 5000))}.fc1.weight"] = torch.zeros(2, 2)
            try:
                with limited():
                    build_model(chosen, model)
                made += 1
            except InvalidInputError as error:
                refused += 1
                check(str(error))
    assert min(made, refused) > 10, (made, refused)


# Their readers take text from a pipe, as from another command, and are given the file alone.
TEXTS = {"pharaoh", "talp", "naacl", "alibi", "tsv", "parallel", "corpus", "gz", "xz", "dictionary"}
TEXTS |= {"bpe", "fastbpe", "results"}


@pytest.mark.parametrize("kind", READERS)
def test_devices_and_pipes_are_refused_before_they_are_read(kind: str, tmp_path: Path) -> None:
    reader = READERS[kind](tmp_path)
    path = tmp_path / reader.name
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")
    with limited(20), bounded(700), pytest.raises(InvalidInputError) as endless:
        reader.read(path)
    check(str(endless.value), path)
    if kind not in TEXTS:
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(InvalidInputError) as pipe:
            reader.read(path)
        check(str(pipe.value), path)


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "a\0b", "\udcff", "\x1b[31m", "\u202e"])
@pytest.mark.parametrize("kind", READERS)
def test_names_that_no_file_has_are_refused(kind: str, name: str, tmp_path: Path) -> None:
    reader = READERS[kind](tmp_path)
    with pytest.raises(InvalidInputError) as caught:
        reader.read(tmp_path / name / reader.name)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("kind", READERS)
def test_a_file_that_is_not_there_and_a_folder_are_refused(kind: str, tmp_path: Path) -> None:
    reader = READERS[kind](tmp_path)
    path = tmp_path / "place" / reader.name
    path.parent.mkdir()
    with pytest.raises(InvalidInputError) as missing:
        reader.read(path)
    check(str(missing.value), path)
    path.mkdir()
    with pytest.raises(InvalidInputError) as folder:
        reader.read(path)
    check(str(folder.value), path)
