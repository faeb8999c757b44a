"""The commands and analyses from and to an S3 bucket."""

import gzip
from pathlib import Path

import pytest

import alignment.cli
import captum_norm.cli
from captum_norm.show import write_report
from captum_norm.text.files import place_of
from tests.alignment.commands.texts import ENGLISH, FRENCH
from tests.commands.calls import refused
from tests.lab.analysis.results import RESULT
from tests.lab.analysis.small import TEXTS, write_model
from tests.object_store import ObjectStore
from tests.runs.test_storage import names, put


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
