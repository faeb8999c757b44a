"""Runs and commands from and to paths and URLs, in memory and in S3: what they ask, and what they do if refused."""

import gzip
import multiprocessing
import os
import signal
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import alignment.cli
import captum_norm.cli
from alignment import Alignment
from alignment.pipeline import ExtractionCounts, extract
from captum_norm import InvalidInputError
from captum_norm.runs import Journal, RayBackend
from captum_norm.show import write_report
from captum_norm.text.files import Remote, place_of
from tests.alignment.commands.texts import ENGLISH, FRENCH
from tests.commands.calls import refused
from tests.fuzzing import FACTOR
from tests.lab.analysis.results import RESULT
from tests.lab.analysis.small import TEXTS, write_model
from tests.object_store import DENIED, ObjectStore, Refusal, Request, environment
from tests.runs import extractions
from tests.runs.extractions import Batch, align, expected, interrupt, run

PAIRS = extractions.text(4 * extractions.BLOCK_LINES - 1)


def put(name: str, content: str | bytes) -> str:
    place_of(name).write(content.encode() if isinstance(content, str) else content)
    return name


def put_text(name: str, pairs: list[tuple[str, str]]) -> str:
    return put(name, "".join(f"{source} ||| {target}\n" for source, target in pairs))


def tree(folder: str) -> dict[str, bytes]:
    """The contents of the files in a folder, but for the lock."""
    return {name: (place_of(folder) / name).read() for name in names(folder)}


def names(folder: str) -> list[str]:
    return sorted(name for name, _ in place_of(folder).entries() if name != "lock")


def check_result(place: str, pairs: list[tuple[str, str]]) -> None:
    """Check that the output is there as if nothing had happened, and nothing else."""
    out = place_of(f"{place}/out").read()
    assert out.decode() == expected(pairs)
    assert names(place) == ["out", "text"]


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_the_output_is_that_of_a_local_run(place: str, tmp_path: Path, packed: str, sides: int) -> None:
    columns = [" ||| ".join(pair) for pair in PAIRS], *zip(*PAIRS, strict=True)
    texts = ["".join(f"{line}\n" for line in lines).encode() for lines in (columns[:1] if sides == 1 else columns[1:])]
    contents = [gzip.compress(text) if packed else text for text in texts]
    urls = [put(f"{place}/text{side}{packed}", content) for side, content in enumerate(contents)]
    paths = [tmp_path / f"text{side}{packed}" for side in range(sides)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    options: Any = {"block_lines": 4, "max_words": 8, "settings": {"layer": 1}, "report": lambda _: None}
    counts = [
        extract(inputs[0], inputs[1] if sides == 2 else None, align, f"{folder}/out{packed}", **options)
        for inputs, folder in ((urls, place), (paths, tmp_path))
    ]
    assert counts[0] == counts[1]
    out = place_of(f"{place}/out{packed}").read()
    assert out == (tmp_path / f"out{packed}").read_bytes()
    assert names(place) == sorted([*(url.rpartition("/")[2] for url in urls), f"out{packed}"])


def test_finished_blocks_are_neither_aligned_nor_counted_again(place: str) -> None:
    pairs = [("a b", "c"), ("", "c"), ("a", "refused"), ("refused", "b")] * 3
    source, out = put_text(f"{place}/text", pairs), f"{place}/out"
    interrupt(source, out, 2)
    assert names(f"{out}.parts") == ["block-000000000", "block-000000001", "job.json"]
    seen, told = list[int](), list[str]()

    def counting(batch: Batch) -> list[Alignment | InvalidInputError]:
        seen.append(len(batch))
        return align(batch)

    counts = extract(source, None, counting, out, block_lines=4, max_words=8, report=told.append)
    assert seen == [3]
    assert counts == ExtractionCounts(lines=12, links=6, empty=3, refused=3)
    assert told == [
        f"{out}.parts: 2 blocks are finished already",
        f"{source}, line 10: got no word on the source side, expected at least one",
        f"{source}, line 12: got a word that is refused",
    ]
    check_result(place, pairs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"settings": {"layer": 2}}, "unfinished run with layer 1, this one has 2; set it back, or start afresh"),
        ({"settings": {"layer": 1, "rule": "é"}}, 'with rule null, this one has "é"'),
        ({"settings": {"layer": 1}, "block_lines": 5}, "with block_lines 4, this one has 5"),
        ({"settings": {"layer": 1}, "max_words": 9}, "with max_words 8, this one has 9"),
    ],
)
def test_another_job_is_refused_until_restart(place: str, options: dict[str, Any], message: str) -> None:
    source, out = put_text(f"{place}/text", PAIRS), f"{place}/out"
    interrupt(source, out, 1, settings={"layer": 1})
    before = tree(f"{out}.parts")
    with pytest.raises(InvalidInputError, match=f"^{out}.parts holds an .*{message}"):
        run(source, out, **options)
    assert tree(f"{out}.parts") == before
    interrupt(source, out, 0, restart=True, **options)
    run(source, out, settings={"layer": 1})  # nothing was finished, so nothing is mixed
    check_result(place, PAIRS)


def test_another_text_is_refused_where_it_was_read(place: str) -> None:
    source, out = put_text(f"{place}/text", PAIRS), f"{place}/out"
    interrupt(source, out, 2)
    changed = [*PAIRS[:7], ("anders", "different"), *PAIRS[8:]]
    put_text(source, changed)
    with pytest.raises(InvalidInputError, match=r"lines 5 to 8 of the input are not .*out.parts has read; set them"):
        run(source, out)
    run(source, out, restart=True)
    check_result(place, changed)


@pytest.mark.parametrize("options", [{}, {"restart": True, "overwrite": True}, {"backend": "ray"}])
@pytest.mark.parametrize("name", ["thesis.txt", "block-000000000", "inner/file"])
def test_a_folder_of_the_user_is_left_alone(place: str, name: str, options: dict[str, Any]) -> None:
    source, out = put_text(f"{place}/text", PAIRS), f"{place}/out"
    if options.get("overwrite"):
        put(out, "old")
    before = names(place)
    for folder in (f"{out}.parts", f"{out}.parts/{name}".rpartition("/")[0]):
        place_of(folder).make()
    put(f"{out}.parts/{name}", "of the user")
    reason = f"it has {name.partition('/')[0]}, but no job.json; move"
    with pytest.raises(
        InvalidInputError, match=f"{out}.parts is in the way of .*, and not an unfinished run: {reason}"
    ):
        run(source, out, **options)
    assert names(place) == sorted([*before, "out.parts"])
    assert names(f"{out}.parts") == [name.partition("/")[0]]
    assert place_of(f"{out}.parts/{name}").read() == b"of the user"


@pytest.mark.parametrize("lines", [1, 15, 100])
def test_an_input_that_changes_during_the_run_is_refused(place: str, lines: int) -> None:
    source, out = put_text(f"{place}/text", PAIRS), f"{place}/out"

    def changing(batch: Batch) -> list[Alignment | InvalidInputError]:
        put_text(source, [("anders", "different")] * lines)
        return align(batch)

    with pytest.raises(InvalidInputError) as found:
        run(source, out, align=changing)
    assert source in str(found.value)
    assert "\n" not in str(found.value)
    assert names(place) == ["out.parts", "text"]
    put_text(source, PAIRS)
    run(source, out)
    check_result(place, PAIRS)


def test_the_old_output_stays_until_the_new_one_is_complete(place: str) -> None:
    source, out = put_text(f"{place}/text", PAIRS), put(f"{place}/out", "old")
    with pytest.raises(InvalidInputError, match=r"out exists already; give another name, or replace it"):
        run(source, out)
    interrupt(source, out, 1, overwrite=True)
    assert place_of(out).read() == b"old"
    run(source, out, overwrite=True)
    check_result(place, PAIRS)


def test_an_output_that_somebody_else_makes_meanwhile_is_not_replaced(place: str) -> None:
    source, out = put_text(f"{place}/text", PAIRS), f"{place}/out"

    def slow(batch: Batch) -> list[Alignment | InvalidInputError]:
        put(out, "of the user")
        return align(batch)

    with pytest.raises(InvalidInputError, match="out has come to exist; move it away and start again: no work is lost"):
        run(source, out, align=slow)
    assert place_of(out).read() == b"of the user"
    place_of(place).remove("out")
    run(source, out, align=None)
    check_result(place, PAIRS)


def test_an_output_with_the_same_content_is_no_other(place: str) -> None:
    out = f"{place}/out"
    place_of(f"{out}.parts").make()
    for content in (b"links", b"links", b"other"):
        refused = pytest.raises(InvalidInputError, match="has come to exist") if content == b"other" else nullcontext()
        with refused, Journal(out, {}).publishing({}, overwrite=False) as file:
            file.write(content)
        assert place_of(out).read() == b"links"
    assert names(f"{out}.parts") == ["published.json"]


def test_outputs_that_cannot_be_written(place: str) -> None:
    source = put_text(f"{place}/text", PAIRS)
    put(f"{place}/other", "of the user")
    for out, message in (
        (source, f"cannot write {source}: it is the input"),
        (f"{source}/", "it is the input"),
        (place, "it is a folder"),
        ("nosuch://out", "cannot reach nosuch://out: Protocol not known"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            run(source, out, overwrite=True)
    assert names(place) == ["other", "text"]


def test_a_folder_where_a_block_should_be_is_refused(place: str) -> None:
    source, out = put_text(f"{place}/text", PAIRS), f"{place}/out"
    interrupt(source, out, 1)
    place_of(f"{out}.parts/block-000000001").make()
    put(f"{out}.parts/block-000000001/inner", "of the user")
    for restart in (False, True):
        with pytest.raises(InvalidInputError, match="its block-000000001 is not a regular file; move it away"):
            run(source, out, restart=restart)
    assert place_of(f"{out}.parts/block-000000001/inner").read() == b"of the user"


def test_a_file_where_the_folder_should_be_is_refused(place: str) -> None:
    source, out = put_text(f"{place}/text", PAIRS), f"{place}/out"
    put(f"{out}.parts", "of the user")
    with pytest.raises(InvalidInputError, match="not an unfinished run: it is not a folder; move it away"):
        run(source, out)
    assert place_of(f"{out}.parts").read() == b"of the user"


def test_results_are_read_ahead_in_order(place: str) -> None:
    pairs = extractions.text(50 * extractions.BLOCK_LINES)
    source, out = put_text(f"{place}/text", pairs), f"{place}/out"
    interrupt(source, out, 30)
    put(f"{out}.parts/block-000000020", "damaged")
    run(source, out)
    check_result(place, pairs)


def test_a_block_costs_few_requests(object_store: ObjectStore) -> None:
    source, out = put_text("s3://bucket/text", PAIRS), "s3://bucket/out"

    def requests(blocks: int) -> list[Request]:
        object_store.requests.clear()
        run(source, out, overwrite=True, block_lines=16 // blocks)
        return object_store.requests.copy()

    _, before, after = requests(1), requests(2), requests(4)
    # For each: is it finished, its text, its result, and again its result.
    assert len(after) - len(before) == 2 * 4
    assert len(before) <= 2 * 4 + 30


def test_whichever_request_fails_nothing_is_lost(object_store: ObjectStore) -> None:
    place, source, out = "s3://bucket", put_text("s3://bucket/text", PAIRS), "s3://bucket/out"
    number, failed = 0, True
    while failed:
        number += 1 if FACTOR > 1 else 3
        interrupt(source, out, 2)
        before = object_store.tree("out.parts/block")
        failing = _Nth(number, lambda: DENIED)
        told: str | None = None
        with object_store.refusing(failing):
            try:
                run(source, out)
            except InvalidInputError as refusal:
                told = str(refusal)
        failed = failing.left <= 0
        if told is not None:
            assert "Access Denied" in told or "Permission denied" in told
            assert "\n" not in told
            if Remote(out).kind() is None:
                assert before.items() <= object_store.tree("out.parts/block").items()
        if told is not None:
            run(source, out, overwrite=True)
        check_result(place, PAIRS)
        Remote(place).remove("out")
        assert object_store.uploads() == []
    assert number > 20


class _Nth:
    """Does something at the n-th request, and ever after."""

    def __init__(self, number: int, do: Any) -> None:
        self.left, self.do = number, do

    def __call__(self, _: Request) -> Refusal | None:
        self.left -= 1
        return self.do() if self.left == 0 else None


@pytest.mark.fuzz
def test_killed_at_any_request_it_goes_on(object_store: ObjectStore, object_store_port: int) -> None:
    place, source, out = "s3://bucket", put_text("s3://bucket/text", PAIRS), "s3://bucket/out"
    context = multiprocessing.get_context("forkserver")
    step = 1 if FACTOR > 1 else 17
    for number in range(2, 1000, step):
        arguments = (dict(environment(object_store_port)), source, out)
        process = context.Process(target=_run_with, args=arguments)
        killing = _Nth(number, lambda process=process: os.kill(process.pid, signal.SIGKILL))
        with object_store.refusing(killing):
            process.start()
            process.join()
        if not Remote(out).kind() or names(f"{out}.parts"):
            run(source, out, overwrite=True)
        check_result(place, PAIRS)
        Remote(place).remove("out")
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert number > 20


def _run_with(variables: Mapping[str, str], source: str, out: str) -> None:
    os.environ.update(variables)
    run(source, out)


def test_workers_share_a_run_from_and_to_a_bucket(object_store: ObjectStore, ray: RayBackend) -> None:
    pairs = extractions.text(10 * extractions.BLOCK_LINES + 1)
    source, out = put_text("s3://bucket/text", pairs), "s3://bucket/out"
    interrupt(source, out, 2)
    run(source, out, backend=ray)
    check_result("s3://bucket", pairs)
    assert object_store.uploads() == []


def test_workers_that_are_refused_say_so(object_store: ObjectStore, ray: RayBackend) -> None:
    source, out = put_text("s3://bucket/text", PAIRS), "s3://bucket/out"
    begun = False

    def denied(request: Request) -> Refusal | None:
        nonlocal begun
        if begun:
            return DENIED
        begun = request == ("PUT", "/bucket/out.parts/job.json", "")
        return None

    with (
        object_store.refusing(denied),
        pytest.raises(InvalidInputError, match=r"Permission denied|Access Denied") as found,
    ):
        run(source, out, backend=ray)
    assert "\n" not in str(found.value)
    run(source, out, backend=ray)
    check_result("s3://bucket", PAIRS)


@pytest.mark.usefixtures("object_store")
def test_extract_from_and_to_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, lines in (("fr", FRENCH), ("en", ENGLISH)):
        text = "".join(f"{line}\n" for line in lines)
        Path(name).write_text(text, encoding="utf-8")
        put(f"s3://bucket/{name}", text)
    options = ["--recipe=mutual", "--layer=0"]
    assert alignment.cli.main(["extract", "fr", "en", "--out=links", *options]) == 0
    remote = ["extract", "s3://bucket/fr", "s3://bucket/en", "--out=s3://bucket/links", *options]
    assert alignment.cli.main(remote) == 0
    assert place_of("s3://bucket/links").read() == Path("links").read_bytes()
    assert alignment.cli.main(remote) == 2
    told = capsys.readouterr().err
    assert "s3://bucket/links exists already" in told
    for words, message in (
        (["s3://bucket/none", "s3://bucket/en"], "cannot read s3://bucket/none: there is no such file"),
        (["s3://nosuchbucket/fr"], "cannot read s3://nosuchbucket/fr: The specified bucket does not exist"),
        (["fr", "en", "--out=s3://nosuchbucket/out"], "The specified bucket does not exist"),
        (["fr", "en", "--out=nosuch://out"], "cannot reach nosuch://out: Protocol not known: nosuch"),
    ):
        assert alignment.cli.main(["extract", *words, *options]) == 2
        told = capsys.readouterr().err
        assert message in told.splitlines()[-1]
    assert names("s3://bucket") == ["en", "fr", "links"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


def test_analyze_from_and_to_a_bucket(
    object_store: ObjectStore, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "".join(f"{line}\n" for line in TEXTS).encode()
    Path("text").write_bytes(text)
    Path("text.gz").write_bytes(gzip.compress(text))
    for name in ("text", "text.gz"):
        object_store.put(name, Path(name).read_bytes())
    for name in ("text", "text.gz"):
        contents = []
        for start in ("", "s3://bucket/"):
            words = ["--corpus", f"{start}{name}", "--out", f"{start}out"]
            assert captum_norm.cli.main(["analyze", "frequency", "--model", model, *words]) == 0
            contents.append(object_store.tree("out/") if start else files(Path("out"), "out/"))
        local, remote = contents
        assert sorted(local) == sorted(remote)
        assert len(local) > 3
        for file, content in local.items():
            # The command line is told in the results.
            assert content == remote[file].replace(b"s3://bucket/", b""), file


def files(folder: Path, prefix: str) -> dict[str, bytes]:
    return {f"{prefix}{path.name}": path.read_bytes() for path in folder.iterdir()}


def test_a_report_is_written_into_a_folder_that_is_not_there(place: str) -> None:
    assert len(write_report(RESULT, f"{place}/report")) == len(names(f"{place}/report")) > 3


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--out=s3://bucket/file", "cannot use s3://bucket/file as a folder: it is a file"),
        ("--out=nosuch://a", "cannot reach nosuch://a: Protocol not known: nosuch"),
        ("--corpus=s3://bucket/none", "cannot read s3://bucket/none: there is no such file"),
    ],
)
def test_what_analyze_refuses_is_one_sentence(
    object_store: ObjectStore,
    model: str,
    option: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    object_store.put("file", b"of the user\n")
    before = object_store.tree()
    assert message in refused(capsys, "analyze", "frequency", "--model", model, "--limit=2", option)
    assert object_store.tree() == before
