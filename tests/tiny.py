"""Tiny random models with a small vocabulary, saved as a user's would be."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "dog", "cat", "runs", "sees", "the", "<", "script", ">", ".")


def bert_config() -> hf.BertConfig:
    """Two layers of a BERT of width 8."""
    return hf.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=12,
    )


def bert() -> Any:
    """A BERT of this configuration."""
    torch.manual_seed(0)
    return hf.BertModel(bert_config()).train(False)


def classifier() -> Any:
    """A classifier of this configuration."""
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(bert_config()).train(False)


def gpt2(layers: int = 2, **more: Any) -> Any:
    """A language model of width 8."""
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": layers, "n_head": 2, "n_positions": 12}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=len(WORDS), **sizes | more)).train(False)


def t5() -> Any:
    """A translation model of width 16."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    ids: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 3}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=len(WORDS), **sizes, **ids)).train(False)


def halves(layers: int, decoder_layers: int, width: int, heads: int = 2, neurons: int | None = None) -> dict[str, Any]:
    """The settings of an encoder and a decoder."""
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": neurons or width}
    encoder = {f"encoder_{name}": size for name, size in sizes.items()}
    decoder = {f"decoder_{name}": size for name, size in (sizes | {"layers": decoder_layers}).items()}
    return {"d_model": width, "max_position_embeddings": 16, **encoder, **decoder}


def bart(vocabulary: int = 20, layers: int = 2, decoder_layers: int = 2, **more: Any) -> Any:
    """A BART of width 8."""
    torch.manual_seed(0)
    return hf.BartModel(hf.BartConfig(vocab_size=vocabulary, **halves(layers, decoder_layers, 8), **more)).train(False)


def marian_config(vocabulary: int = len(WORDS), layers: int = 1, width: int = 8) -> hf.MarianConfig:
    """A translation model whose padding begins its targets."""
    sizes = halves(layers, layers, width)
    return hf.MarianConfig(vocab_size=vocabulary, pad_token_id=0, decoder_start_token_id=0, eos_token_id=3, **sizes)


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """One token a word, [CLS] before and [SEP] behind the text."""
    core = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.normalizer = BertNormalizer(lowercase=False)
    core.pre_tokenizer = Whitespace()
    core.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return hf.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def edit_json(file: Path, **changes: Any) -> None:
    """Change entries of a file."""
    file.write_text(json.dumps(json.loads(file.read_bytes()) | changes), encoding="utf-8")


def save_tiny(model: hf.PreTrainedModel, folder: Path) -> Path:
    """Save a model and the tokenizer."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
