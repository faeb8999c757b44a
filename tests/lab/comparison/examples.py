"""A small comparison to show: two sentences, one padded on each side, a method that is refused."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import transformers as hf

from captum_norm import compare
from captum_norm.lab.comparison import Comparison
from tests import families
from tests.classifiers import TOKENIZER, classifier, randomized, sentences

HOSTILE = "<script>alert('x')</script>"
TEXTS = [["[CLS]", "a", HOSTILE, "é", "[SEP]", "[PAD]", "[PAD]"], ["[CLS]", "x", 'y"', "z,", "$w$", ":mask:", "[SEP]"]]
METHODS = ["norm", "decompx", "occlusion", "input-gradient", "random"]


def language_model() -> Any:
    """A causal language model with random weights, which GlobEnc does not take."""
    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=families.VOCABULARY, n_embd=16, n_layer=2, n_head=4, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    return randomized(hf.GPT2LMHeadModel(config), 0)


@cache
def comparison(kind: str = "classifier") -> Comparison:
    """Of a classifier, or of a causal language model."""
    ids, mask = sentences([5, 7])
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "name": HOSTILE}
    if kind == "classifier":
        return replace(compare(classifier(), ids, mask, methods=METHODS, **options), tokens=TEXTS)
    return replace(
        compare(language_model(), ids, mask, methods=[*METHODS, "globenc"], output="logit", **options), tokens=TEXTS
    )
