"""Further text encoders, for each of which one test checks everything at once."""

from typing import Any

from tests.families.encoders import NOMIC, POST_NORM
from tests.families.family import BERT, GROUPED, TEXT, VOCABULARY, Family, new
from tests.families.llamas import LOCAL_EXPERTS

DPR = BERT | {"layer": "ctx_encoder.bert_model.encoder.layer.{}"}

ROC: dict[str, Any] = {"pronunciation_embed_dim": 16, "shape_embed_dim": 16}
ROC |= dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), VOCABULARY)

FURTHER_ENCODERS = {
    "bert-generation": Family(new("BertGenerationEncoder", **TEXT), **BERT, single=True),
    "big-bird": Family(new("BigBirdModel", **TEXT, attention_type="original_full"), **BERT),
    "dpr": Family(new("DPRContextEncoder", **TEXT), **DPR),
    "gte": Family(new("GteModel", **TEXT), **NOMIC | POST_NORM),
    "luke": Family(new("LukeModel", **TEXT, entity_vocab_size=10, entity_emb_size=16), **BERT),
    "markuplm": Family(new("MarkupLMModel", **TEXT, max_depth=4), **BERT, single=True),
    "splinter": Family(new("SplinterModel", **TEXT), **BERT, single=True),
    "tapas": Family(new("TapasModel", **TEXT), **BERT),
    "visual-bert": Family(new("VisualBertModel", **TEXT, visual_embedding_dim=16), **BERT),
    "esmc": Family(
        new("EsmcModel", **TEXT), **NOMIC, branch_factor="1/scaling_factor", special=("residual multiplier",)
    ),
    "roc-bert": Family(new("RoCBertModel", **TEXT, **ROC), **BERT),
    "ultrabert": Family(new("UltrabertModel", **GROUPED), **NOMIC, special=("grouped queries",)),
    "embedding-gemma2": Family(
        new("EmbeddingGemma2TextModel", **GROUPED, head_dim=8),
        **NOMIC
        | {"style": "sandwich", "branch_norm": "post_attention_layernorm", "centered": False}
        | {"value": "self_attn.v_norm", "values": lambda output: output.transpose(1, 2).flatten(-2)},
        special=("grouped queries",),
    ),
    "openai-privacy-filter": Family(
        new("OpenAIPrivacyFilterModel", **GROUPED, **LOCAL_EXPERTS, head_dim=8),
        **NOMIC,
        special=("grouped queries", "attention sinks", "mixture of experts"),
    ),
}
