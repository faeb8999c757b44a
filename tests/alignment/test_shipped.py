"""The models that come with the package are whole."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import alignment
from alignment.fairseq.loading import load_shipped_model, shipped_models
from captum_norm import InvalidInputError

MODELS = Path(alignment.__file__).parent / "models"


@pytest.mark.parametrize("name", shipped_models())
def test_the_weights_are_those_of_the_file(name: str) -> None:
    state = load_shipped_model(name)[0].state_dict()
    weights = load_file(MODELS / name / "model.safetensors")
    for key, tensor in weights.items():
        assert torch.equal(state[f"model.{key}"], tensor.float())
    embedding = weights["encoder.embed_tokens.weight"].float()
    assert torch.equal(state["lm_head.weight"], embedding)
    assert torch.equal(state["model.decoder.embed_tokens.weight"], embedding)


def test_other_names_are_refused() -> None:
    for name in ("fr-de", "", "..", "../models/fr-en"):
        with pytest.raises(InvalidInputError, match=r"expected one of .*fr-en"):
            load_shipped_model(name)
