"""What contributors meet first is in order: the workflow, and the way of a call."""

import os
import re
import tomllib
from typing import Any

import yaml

from tests.test_readme import ROOT


def test_the_workflow_runs_all_checks_with_the_lowest_python() -> None:
    workflow: Any = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8"))
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
