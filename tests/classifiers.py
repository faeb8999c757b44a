"""Small models whose outputs are explained, with what their tokenizers would know."""

from types import SimpleNamespace
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from tests import families

MASK, CLS, SEP = 3, 1, 2
TOKENIZER = SimpleNamespace(mask_token_id=MASK, pad_token_id=0, all_special_ids=[0, CLS, SEP, MASK])


def randomized(model: Any, seed: int = 0, dtype: torch.dtype = torch.float64, noise: float = 0.15) -> Any:
    """Random weights, biases, γ and β, none of them at its initial value, in ``eval()``."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model.eval().to(dtype)


def classifier(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A BERT with three classes, and changes of its configuration."""
    torch.manual_seed(seed)
    config = hf.BertConfig(**families.TEXT | {"num_labels": 3} | changes)
    return randomized(hf.BertForSequenceClassification(config), seed, dtype)


def sentences(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """[CLS] … [SEP] of these lengths, padded by turns on the right and on the left: ids and mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        words = torch.randint(4, families.VOCABULARY, (length,), generator=generator)
        words[0], words[-1] = CLS, SEP
        start = (width - length) * (row % 2)
        ids[row, start : start + length], mask[row, start : start + length] = words, 1
    return ids, mask


def alone(values: Tensor, mask: Tensor, row: int) -> Tensor:
    """One example's entries without its padding, in a batch of one."""
    return values[row : row + 1, mask[row].bool()]
