"""A job as a step of a Ray Data pipeline; docs/how-to/own-statistic.md, which runs as a test, has a whole one."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import pytest

from captum_norm import InvalidInputError
from captum_norm.runs import Attempt, Block, BlockWorker, Job, Parts, RayBackend, Record, Work, share
from tests.test_readme import ROOT, blocks


class Pairs(Job[None]):
    """Joins the lines of two files; says which are empty."""

    def blocks(self) -> Iterator[Block]:
        raise NotImplementedError

    def worker(self) -> Work:
        def work(attempt: Attempt) -> Record:
            sides = [content.decode(errors="surrogatepass").split("\n")[:-1] for content in attempt.block.read()]
            pairs = list(zip_longest(*sides))
            attempt.messages.extend(f"{part.source}" for part in attempt.block.parts)
            attempt.messages.extend(f"line {number}" for number, pair in enumerate(pairs, 1) if "" in pair)
            return Record({"pairs": len(pairs)}, repr(pairs).encode(errors="surrogatepass"))

        return work

    def finish(self, parts: Parts) -> None:
        raise NotImplementedError


@pytest.fixture(name="worker")
def loaded(ray: RayBackend) -> BlockWorker:  # noqa: ARG001 - it is running
    return BlockWorker(share(Pairs("", {})), ["left", "right"])


def test_a_batch_is_a_block(worker: BlockWorker) -> None:
    batch: dict[str, list[Any]] = {"left": ["a", "", "c\u2028c"], "right": ["x", "y", "\udc80"], "other": [1, 2, 3]}
    rows = worker(batch)
    assert rows["notes"] == ['{"pairs": 3}']
    assert rows["content"] == [repr([("a", "x"), ("", "y"), ("c\u2028c", "\udc80")]).encode(errors="surrogatepass")]
    assert rows["messages"] == ["left\nright\nline 2"]


def test_an_empty_batch_has_no_block(worker: BlockWorker) -> None:
    assert worker({"left": [], "right": []}) == {"notes": [], "content": [], "messages": []}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"text": ["a"]}, "got rows with the columns text; expected left"),
        ({"left": ["a\nb"], "right": ["x"]}, r"got 'a\\nb' as left; expected a string of one line in each row"),
        ({"left": ["a"], "right": [None]}, "got None as right; expected a string"),
    ],
)
def test_rows_that_are_no_lines_are_refused(worker: BlockWorker, batch: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        worker(batch)


def test_other_versions_are_refused(ray: RayBackend) -> None:  # noqa: ARG001
    shared = share(Pairs("", {}))
    with pytest.raises(InvalidInputError, match=r"got torch .*, expected 0 as in .*; install the same versions"):
        BlockWorker(shared._replace(versions={"torch": "0"}))


def test_the_statistic_of_the_page_is_short() -> None:
    page = ROOT / "docs" / "how-to" / "own-statistic.md"
    assert len(blocks(page, "python")[0].strip().splitlines()) <= 40
