"""What contributors meet first is in order: the workflow, the way of a call, and the check of a release."""

import io
import os
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.release import complaints
from tests.test_readme import ROOT


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_workflow_runs_all_checks_with_the_lowest_python() -> None:
    workflow = parsed(ROOT / ".github" / "workflows" / "checks.yml")
    (job,) = workflow["jobs"].values()
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


def test_every_file_of_tests_that_draws_more_cases_on_request_is_in_make_fuzz() -> None:
    tests = Path(__file__).parent
    drawing = [
        path
        for path in tests.rglob("test_*.py")
        if path != Path(__file__) and any(name in path.read_text(encoding="utf-8") for name in ("_NORM_FUZZ", "FACTOR"))
    ]
    assert len(drawing) >= 2
    assert [path for path in drawing if "pytest.mark.fuzz" not in path.read_text(encoding="utf-8")] == []


def archives(folder: Path, *, wheel: dict[str, str], sources: list[str]) -> tuple[Path, Path]:
    paths = folder / "a.tar.gz", folder / "a.whl"
    with tarfile.open(paths[0], "w:gz") as opened:
        for name in sources:
            opened.addfile(tarfile.TarInfo(f"captum_norm-0.3.0/{name}"), io.BytesIO())
    with zipfile.ZipFile(paths[1], "w") as written:
        for name, text in wheel.items():
            written.writestr(name, text)
    return paths


GOOD_WHEEL = {
    "captum_norm/py.typed": "",
    "alignment/py.typed": "",
    "captum_norm-0.3.0.dist-info/METADATA": "Metadata-Version: 2.4\nName: captum-norm\nVersion: 0.3.0\n",
} | {str(path.relative_to(ROOT)): "" for path in (ROOT / "captum_norm").rglob("show/assets/*")}
GOOD_SOURCES = ["LICENSE", "CHANGELOG.md", "tests/release.py", "pyproject.toml"]
GOOD_CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [0.3.0] - 2027-01-01\n\n### Added\n"


def test_a_release_in_order_has_no_complaint(tmp_path: Path) -> None:
    assert complaints(*archives(tmp_path, wheel=GOOD_WHEEL, sources=GOOD_SOURCES), GOOD_CHANGELOG) == []


@pytest.mark.parametrize(
    ("wheel", "sources", "changelog", "complaint"),
    [
        ({**GOOD_WHEEL, "tests/a.py": ""}, GOOD_SOURCES, GOOD_CHANGELOG, "alone"),
        ({**GOOD_WHEEL, "captum_norm/script/a.js": ""}, GOOD_SOURCES, GOOD_CHANGELOG, "nobody runs"),
        (GOOD_WHEEL, GOOD_SOURCES[1:], GOOD_CHANGELOG, r"archive lacks \['LICENSE'\]"),
        (GOOD_WHEEL, GOOD_SOURCES, GOOD_CHANGELOG.replace("0.3.0", "0.30"), r"no dated section \[0.3.0\]"),
        (GOOD_WHEEL, GOOD_SOURCES, GOOD_CHANGELOG.replace(" - 2027-01-01", ""), "no dated section"),
        (GOOD_WHEEL, GOOD_SOURCES, GOOD_CHANGELOG.replace("d]\n", "d]\n\n### Fixed\n", 1), "under Unreleased"),
    ],
)
def test_what_is_wrong_with_a_release_is_said(
    tmp_path: Path, wheel: dict[str, str], sources: list[str], changelog: str, complaint: str
) -> None:
    found = complaints(*archives(tmp_path, wheel=wheel, sources=sources), changelog)
    assert len(found) >= 1
    assert re.search(complaint, found[0])
