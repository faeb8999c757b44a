"""A release is what its tag says, and the pages for programs and papers name what exists."""

import json
import re
import subprocess
import tomllib
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
FILES = (
    "pyproject.toml",
    "constraints.txt",
    "CHANGELOG.md",
    "CITATION.cff",
    ".github/conda/recipe.yaml",
    ".ci/release.py",
)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with what a release is checked by, and a tag."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (
        ["init", "-q"],
        ["add", "."],
        [*who, "commit", "-qm", "a"],
        ["tag", f"v{VERSION}"],
        ["tag", "v0.0.1"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def check(clone: Path, tag: str | None) -> None:
    run_path(str(clone / ".ci" / "release.py"))["main"](tag)


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def test_archives_have_a_statement_of_what_they_were_built_from(clone: Path) -> None:
    check(clone, f"v{VERSION}")
    (clone / "dist").mkdir()
    for start in (f"captum_norm-{VERSION}", "captum_norm_models-1.0"):
        for end in (".tar.gz", "-py3-none-any.whl"):
            (clone / "dist" / f"{start}{end}").write_text(start + end)
    check(clone, f"v{VERSION}")
    folder = clone / "build" / "provenance"
    subprocess.run(["sha256sum", "--check", "--quiet", folder / "SHA256SUMS"], cwd=clone / "dist", check=True)
    statement = json.loads((folder / "provenance.intoto.json").read_bytes())
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True, check=True).stdout
    build = statement["predicate"]["buildDefinition"]
    file, _, anchor = build["buildType"].partition("/blob/main/")[2].partition("#")
    assert f"\n## {anchor.capitalize()}\n" in (ROOT / file).read_text(encoding="utf-8")
    source, _ = build["resolvedDependencies"]
    assert source["digest"]["gitCommit"] == commit.strip()
    digests = {entry["name"]: entry["digest"]["sha256"] for entry in statement["subject"]}
    assert len(digests) == 4
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == VERSION
    assert recipe["source"]["sha256"] == digests[f"captum_norm-{VERSION}.tar.gz"]
    assert {"python >=3.11", "captum >=0.8"} <= set(recipe["requirements"]["run"])
    assert (folder / "CHANGES.md").read_text(encoding="utf-8").startswith("### Added")


@pytest.mark.parametrize(
    ("tag", "file", "old", "new", "message"),
    [
        ("v9.9.9", None, "", "", f"the tag is v9.9.9, the version {VERSION}"),
        (f"v{VERSION}", "CITATION.cff", f"version: {VERSION}", "version: 9", "CITATION.cff has another version"),
        (
            f"v{VERSION}",
            "CHANGELOG.md",
            f"## [{VERSION}] - ",
            "## [9.9.9] - ",
            rf"CHANGELOG.md has no section \[{VERSION}",
        ),
        (None, "pyproject.toml", f'version = "{VERSION}"', 'version = "0.0.1"', "CHANGELOG.md has no section"),
    ],
)
def test_what_is_no_release_is_refused(clone: Path, tag: Any, file: Any, old: str, new: str, message: str) -> None:
    if file is not None:
        change(clone / file, old, new)
    with pytest.raises(SystemExit, match=message):
        check(clone, tag)


def test_a_tag_of_another_commit_is_refused(clone: Path) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, "commit", "-q", "--allow-empty", "-m", "b"], cwd=clone, check=True)
    with pytest.raises(SystemExit, match="is not the commit that is checked out"):
        check(clone, f"v{VERSION}")


def test_a_tag_is_built_checked_and_published_without_a_token() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    jobs: Any = yaml.safe_load(text)["jobs"]
    assert 'make release-check TAG="$GITHUB_REF_NAME"' in [step.get("run") for step in jobs["build"]["steps"]]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write", "attestations": "write"}
    assert "secrets." not in text


def test_both_distributions_have_the_licence() -> None:
    assert (ROOT / "captum_norm_models" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_page_for_programs_and_the_paper_name_what_exists() -> None:
    for file in ("docs/llms.txt", "AGENTS.md", "docs/paper/paper.md"):
        path = ROOT / file
        text = path.read_text(encoding="utf-8")
        links = [link for link in re.findall(r"\]\(([^)#:]+)\)", text) if "://" not in link]
        assert links
        for link in links:
            name = link.replace(".html", ".md") if file == "docs/llms.txt" else link
            assert (path.parent / name).exists(), link
        assert len(text.split()) < 700  # a page
    entries = set(
        re.findall(r"^@\w+\{(\w+),", (ROOT / "docs/paper/paper.bib").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert set(re.findall(r"@(\w+)", (ROOT / "docs/paper/paper.md").read_text(encoding="utf-8"))) == entries
