"""The models that come with the package: whole, and able to translate."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import alignment
from alignment.fairseq.loading import load_shipped_model, shipped_models
from captum_norm import InvalidInputError

MODELS = Path(alignment.__file__).parent / "models"
SENTENCES = {
    "fr-en": [
        ("le débat est clos .", "the debate is closed ."),
        ("le vote aura lieu demain .", "the vote will take place tomorrow ."),
        ("le conseil a adopté la proposition .", "the council adopted the proposal ."),
    ],
    "en-fr": [("the debate is closed .", "le débat est clos .")],
}


@pytest.mark.parametrize("name", shipped_models())
def test_a_model_translates(name: str) -> None:
    model: Any
    model, tokenizer = load_shipped_model(name)
    assert f"{tokenizer.source_language}-{tokenizer.target_language}" == name
    sources, targets = zip(*SENTENCES[name], strict=True)
    encoded = tokenizer.encode_source([source.split() for source in sources])
    length = max(len(sentence.ids) for sentence in encoded)
    ids = torch.tensor([sentence.ids + [1] * (length - len(sentence.ids)) for sentence in encoded])
    found = model.generate(ids, attention_mask=ids.ne(1).long(), num_beams=4)
    assert [" ".join(tokenizer.decode_target(row)) for row in found.tolist()] == list(targets)
    assert tokenizer.decode_target(tokenizer.encode_target([targets[0].split()])[0].ids) == targets[0].split()


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
