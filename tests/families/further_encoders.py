"""Further text encoders, for each of which one test checks everything at once."""

from typing import Any

import transformers as hf

from tests.families.family import BERT, GROUPED, TEXT, VOCABULARY, Family
from tests.families.llamas import LOCAL_EXPERTS

NOMIC: dict[str, Any] = {
    "layer": "layers.{}",
    "value": "self_attn.v_proj",
    "projection": "self_attn.o_proj",
    "style": "pre-norm",
    "single": True,
    "positions": "rotary",
}
POST_NORM: dict[str, Any] = {"style": "post-norm", "final_norm": "post_attention_layernorm"}


DPR = BERT | {"layer": "ctx_encoder.bert_model.encoder.layer.{}"}

FURTHER_ENCODERS = {
    "bert-generation": Family(lambda: hf.BertGenerationEncoder(hf.BertGenerationConfig(**TEXT)), **BERT, single=True),
    "big-bird": Family(lambda: hf.BigBirdModel(hf.BigBirdConfig(**TEXT, attention_type="original_full")), **BERT),
    "dpr": Family(lambda: hf.DPRContextEncoder(hf.DPRConfig(**TEXT)), **DPR),
    "gte": Family(lambda: hf.GteModel(hf.GteConfig(**TEXT)), **NOMIC | POST_NORM),
    "luke": Family(lambda: hf.LukeModel(hf.LukeConfig(**TEXT, entity_vocab_size=10, entity_emb_size=16)), **BERT),
    "markuplm": Family(lambda: hf.MarkupLMModel(hf.MarkupLMConfig(**TEXT, max_depth=4)), **BERT, single=True),
    "splinter": Family(lambda: hf.SplinterModel(hf.SplinterConfig(**TEXT)), **BERT, single=True),
    "tapas": Family(lambda: hf.TapasModel(hf.TapasConfig(**TEXT)), **BERT),
    "visual-bert": Family(lambda: hf.VisualBertModel(hf.VisualBertConfig(**TEXT, visual_embedding_dim=16)), **BERT),
    "esmc": Family(
        lambda: hf.EsmcModel(hf.EsmcConfig(**TEXT)),
        **NOMIC,
        branch_factor="1/scaling_factor",
        special=("residual multiplier",),
    ),
    "roc-bert": Family(
        lambda: hf.RoCBertModel(
            hf.RoCBertConfig(
                **TEXT,
                pronunciation_embed_dim=16,
                pronunciation_vocab_size=VOCABULARY,
                shape_embed_dim=16,
                shape_vocab_size=VOCABULARY,
            )
        ),
        **BERT,
    ),
    "ultrabert": Family(
        lambda: hf.UltrabertModel(hf.UltrabertConfig(**GROUPED)), **NOMIC, special=("grouped queries",)
    ),
    "embedding-gemma2": Family(
        lambda: hf.EmbeddingGemma2TextModel(hf.EmbeddingGemma2TextConfig(**GROUPED, head_dim=8)),
        **NOMIC
        | {"style": "sandwich", "branch_norm": "post_attention_layernorm", "centered": False}
        | {"value": "self_attn.v_norm", "values": lambda output: output.transpose(1, 2).flatten(-2)},
        special=("grouped queries",),
    ),
    "openai-privacy-filter": Family(
        lambda: hf.OpenAIPrivacyFilterModel(hf.OpenAIPrivacyFilterConfig(**GROUPED, **LOCAL_EXPERTS, head_dim=8)),
        **NOMIC,
        special=("grouped queries", "attention sinks", "mixture of experts"),
    ),
}
