"""Small SentenceTransformers with random weights."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.lab.analysis.small import randomized
from tests.tiny import bert_config, save_tiny


def sentence_transformer(folder: Path, *modules: Any, **options: Any) -> Any:
    """A SentenceTransformer of a small BERT in double precision, and further modules."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer

    torch.manual_seed(0)
    first = Transformer(str(save_tiny(transformers.BertModel(bert_config()), folder)))
    return randomized(SentenceTransformer(modules=[first, *modules], device="cpu", **options), torch.float64)
