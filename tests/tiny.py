"""Tiny random models with a small vocabulary, saved as a user's would be."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, PreTrainedModel, PreTrainedTokenizerFast

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "dog", "cat", "runs", "sees", "the", "<", "script", ">", ".")


def bert_config() -> BertConfig:
    """Two layers of a BERT of width 8."""
    return BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=12,
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, [CLS] before and [SEP] behind the text."""
    core = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.normalizer = BertNormalizer(lowercase=False)
    core.pre_tokenizer = Whitespace()
    core.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def save_tiny(model: PreTrainedModel, folder: Path) -> Path:
    """Save a model and the tokenizer."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
