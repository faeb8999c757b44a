"""Text encoders."""

from typing import Any

from tests.families.family import (
    BERT,
    BERT_PRE_NORM,
    GROUPED,
    HEADS,
    SPECIAL,
    TEXT,
    VOCABULARY,
    Family,
    each_last,
    new,
    part,
)

DEBERTA: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
DEBERTA_V2 = DEBERTA | {"position_buckets": 4, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
DISTILBERT: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
DISTILBERT |= {"dim": 32, "n_layers": 2, "n_heads": HEADS, "hidden_dim": 48}
T5: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 12, "num_layers": 2, "num_heads": HEADS}

BERT_RELATIVE = BERT | {"positions": "learned and relative"}
NOMIC: dict[str, Any] = {
    "layer": "layers.{}",
    "value": "self_attn.v_proj",
    "projection": "self_attn.o_proj",
    "style": "pre-norm",
    "single": True,
    "positions": "rotary",
}
POST_NORM: dict[str, Any] = {"style": "post-norm", "final_norm": "post_attention_layernorm"}

ENCODERS = {
    "bert": Family(new("BertModel", **TEXT), **BERT),
    "roberta": Family(new("RobertaModel", **TEXT), **BERT),
    "xlm-roberta": Family(new("XLMRobertaModel", **TEXT), **BERT),
    "camembert": Family(new("CamembertModel", **TEXT), **BERT),
    "xlm-roberta-xl": Family(new("XLMRobertaXLModel", **TEXT), **BERT_PRE_NORM),
    "roberta-prelayernorm": Family(new("RobertaPreLayerNormModel", **TEXT), **BERT_PRE_NORM),
    "xmod": Family(
        new("XmodModel", **TEXT, languages=["en_XX"], default_language="en_XX"), **BERT | {"special": ("adapters",)}
    ),
    "data2vec-text": Family(new("Data2VecTextModel", **TEXT), **BERT),
    "electra": Family(new("ElectraModel", **TEXT, embedding_size=16), **BERT),
    "ernie": Family(new("ErnieModel", **TEXT), **BERT),
    "layoutlm": Family(new("LayoutLMModel", **TEXT), **BERT, single=True),
    "rembert": Family(new("RemBertModel", **TEXT, input_embedding_size=16, output_embedding_size=16), **BERT),
    "megatron-bert": Family(new("MegatronBertModel", **TEXT), **BERT_PRE_NORM),
    "roformer": Family(new("RoFormerModel", **TEXT, embedding_size=32), **BERT | {"positions": "rotary"}),
    "esm": Family(
        new("EsmModel", **TEXT, mask_token_id=3, position_embedding_type="rotary"),
        **BERT_PRE_NORM | {"positions": "rotary"},
    ),
    "mpnet": Family(
        new("MPNetModel", **TEXT),
        **BERT_RELATIVE
        | {"value": "attention.attn.v", "projection": "attention.attn.o", "final_norm": "attention.LayerNorm"},
    ),
    "deberta": Family(
        new("DebertaModel", **TEXT, **DEBERTA, max_relative_positions=16),
        **BERT_RELATIVE | {"value": "attention.self.in_proj", "values": each_last(HEADS, 8)},
        value_bias="attention.self.v_bias",
        single=True,
    ),
    "deberta-v2": Family(
        new("DebertaV2Model", **TEXT, **DEBERTA_V2), **BERT_RELATIVE | {"value": "attention.self.value_proj"}
    ),
    "albert": Family(
        new("AlbertModel", **TEXT, embedding_size=16),
        "encoder.albert_layer_groups.0.albert_layers.0",
        "attention.value",
        "attention.dense",
        "post-norm",
        final_norm="attention.LayerNorm",
        special=("shared layers",),
    ),
    "distilbert": Family(
        new("DistilBertModel", **DISTILBERT),
        "transformer.layer.{}",
        "attention.v_lin",
        "attention.out_lin",
        "post-norm",
        final_norm="sa_layer_norm",
    ),
    "nomic-bert": Family(new("NomicBertModel", **TEXT), **NOMIC | POST_NORM),
    "jina-embeddings-v3": Family(new("JinaEmbeddingsV3Model", **TEXT), **NOMIC | POST_NORM),
    "modernbert": Family(
        new("ModernBertModel", **TEXT, **SPECIAL, local_attention=4),
        **NOMIC | {"value": "attn.Wqkv", "projection": "attn.Wo", "values": part(2)},
        special=("sliding window",),
    ),
    "eurobert": Family(new("EuroBertModel", **GROUPED), **NOMIC, special=("grouped queries",)),
    "t5-encoder": Family(
        new("T5EncoderModel", **T5, d_ff=48),
        "encoder.block.{}.layer.0",
        "SelfAttention.v",
        "SelfAttention.o",
        "pre-norm",
        single=True,
        positions="relative",
    ),
}
