"""Files that earlier versions wrote: all of them load for ever, with every number that they hold."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from captum_norm import AttributionMaps
from captum_norm.attr.measurements import Measurements
from captum_norm.explanation import Explanation
from captum_norm.generation import GenerationResult
from captum_norm.lab.comparison import Comparison
from captum_norm.results.base import VERSION, Result

RELEASED = Path(__file__).parent / "released"
KINDS: dict[str, type[Result]] = {
    "comparison": Comparison,
    "explanation": Explanation,
    "flow": Explanation,
    "generation": GenerationResult,
    "maps": AttributionMaps,
    "measurements": Measurements,
}


def tensors(path: Path) -> list[torch.Tensor]:
    with safe_open(path, "pt") as file:
        return [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 - it is no mapping


@pytest.mark.parametrize("version", range(1, VERSION + 1))
@pytest.mark.parametrize("name", KINDS)
def test_files_of_every_version_load(name: str, version: int, tmp_path: Path) -> None:
    path = RELEASED / f"version-{version}" / f"{name}.safetensors"
    with safe_open(path, "pt") as file:
        assert file.metadata()["version"] == str(version)
    found = KINDS[name].load(path)
    assert len(found._repr_html_()) > 1000
    again = tmp_path / "again.safetensors"
    found.save(again)
    assert KINDS[name].load(again) == found
    kept = tensors(again)
    assert all(any(torch.equal(number, other) for other in kept) for number in tensors(path))
