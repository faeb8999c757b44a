"""The versions that the checks run with, and those that tests need."""

from functools import cache
from importlib.metadata import version

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.lowest_versions import ROOT

SINCE = {
    "Gemma4UnifiedForCausalLM": "5.10",
    "MellumForCausalLM": "5.10",
    "Sapiens2Model": "5.10",
    "DeepseekV32ForCausalLM": "5.11",
    "MiniMaxM3VLForCausalLM": "5.12",
    "DeepseekV2ForCausalLM": "5.13",
    "GraniteMoeForCausalLM": "5.13",
    "MiMoV2FlashForCausalLM": "5.13",
    "NemotronForCausalLM": "5.13",
    "Qwen3NextForCausalLM": "5.13",
    "Qwen3_5ForCausalLM": "5.13",
    "Tipsv2VisionModel": "5.14",
    "GraniteSWAForCausalLM": "5.15",
    "EsmcModel": "5.16",
    "Dinov2Model": "5.18",
    "Dinov2WithRegistersModel": "5.18",
    "GteModel": "5.18",
    "SwitchTransformersForConditionalGeneration": "5.18",
    "EmbeddingGemma2TextModel": "5.19",
    "Kolibri1ForCausalLM": "5.20",
    "Molmo2TextModel": "5.20",
    "UltrabertModel": "5.20",
    "FlintForCausalLM": "5.21",
}
"""Classes that the lowest transformers lacks or has in another form, and the version since which they are as tested."""


@cache
def pinned(constraints: str = "constraints.txt") -> dict[str, Version]:
    """The versions that a file of constraints pins, by package."""
    lines = (ROOT / constraints).read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines)
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def older(lowest: str) -> bool:
    """Whether transformers is older than this version."""
    return Version(version("transformers")) < Version(lowest)


def since(lowest: str, why: str) -> pytest.MarkDecorator:
    """Skip a test where transformers is older than this version."""
    return pytest.mark.skipif(older(lowest), reason=f"transformers before {lowest}: {why}")
