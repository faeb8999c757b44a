"""Text encoders."""

from typing import Any

import transformers as hf

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
    part,
)

DEBERTA: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
DEBERTA_V2 = DEBERTA | {"position_buckets": 4, "share_att_key": True, "norm_rel_ebd": "layer_norm"}

DEBERTA_V2 = DEBERTA | {"position_buckets": 4, "share_att_key": True, "norm_rel_ebd": "layer_norm"}

ENCODERS = {
    "bert": Family(lambda: hf.BertModel(hf.BertConfig(**TEXT)), **BERT),
    "roberta": Family(lambda: hf.RobertaModel(hf.RobertaConfig(**TEXT)), **BERT),
    "xlm-roberta": Family(lambda: hf.XLMRobertaModel(hf.XLMRobertaConfig(**TEXT)), **BERT),
    "camembert": Family(lambda: hf.CamembertModel(hf.CamembertConfig(**TEXT)), **BERT),
    "xlm-roberta-xl": Family(lambda: hf.XLMRobertaXLModel(hf.XLMRobertaXLConfig(**TEXT)), **BERT_PRE_NORM),
    "roberta-prelayernorm": Family(
        lambda: hf.RobertaPreLayerNormModel(hf.RobertaPreLayerNormConfig(**TEXT)), **BERT_PRE_NORM
    ),
    "xmod": Family(
        lambda: hf.XmodModel(hf.XmodConfig(**TEXT, languages=["en_XX"], default_language="en_XX")),
        **BERT | {"special": ("adapters",)},
    ),
    "data2vec-text": Family(lambda: hf.Data2VecTextModel(hf.Data2VecTextConfig(**TEXT)), **BERT),
    "electra": Family(lambda: hf.ElectraModel(hf.ElectraConfig(**TEXT, embedding_size=16)), **BERT),
    "ernie": Family(lambda: hf.ErnieModel(hf.ErnieConfig(**TEXT)), **BERT),
    "layoutlm": Family(lambda: hf.LayoutLMModel(hf.LayoutLMConfig(**TEXT)), **BERT, single=True),
    "rembert": Family(
        lambda: hf.RemBertModel(hf.RemBertConfig(**TEXT, input_embedding_size=16, output_embedding_size=16)), **BERT
    ),
    "megatron-bert": Family(lambda: hf.MegatronBertModel(hf.MegatronBertConfig(**TEXT)), **BERT_PRE_NORM),
    "roformer": Family(
        lambda: hf.RoFormerModel(hf.RoFormerConfig(**TEXT, embedding_size=32)), **BERT | {"positions": "rotary"}
    ),
    "esm": Family(
        lambda: hf.EsmModel(hf.EsmConfig(**TEXT, mask_token_id=3, position_embedding_type="rotary")),
        **BERT_PRE_NORM | {"positions": "rotary"},
    ),
    "mpnet": Family(
        lambda: hf.MPNetModel(hf.MPNetConfig(**TEXT)),
        **BERT
        | {
            "value": "attention.attn.v",
            "projection": "attention.attn.o",
            "final_norm": "attention.LayerNorm",
            "positions": "learned and relative",
        },
    ),
    "deberta": Family(
        lambda: hf.DebertaModel(hf.DebertaConfig(**TEXT, **DEBERTA, max_relative_positions=16)),
        **BERT
        | {
            "value": "attention.self.in_proj",
            "values": each_last(HEADS, 8),
            "value_bias": "attention.self.v_bias",
            "single": True,
            "positions": "learned and relative",
        },
    ),
    "deberta-v2": Family(
        lambda: hf.DebertaV2Model(hf.DebertaV2Config(**TEXT, **DEBERTA_V2)),
        **BERT | {"value": "attention.self.value_proj", "positions": "learned and relative"},
    ),
    "albert": Family(
        lambda: hf.AlbertModel(hf.AlbertConfig(**TEXT, embedding_size=16)),
        "encoder.albert_layer_groups.0.albert_layers.0",
        "attention.value",
        "attention.dense",
        "post-norm",
        final_norm="attention.LayerNorm",
        special=("shared layers",),
    ),
    "distilbert": Family(
        lambda: hf.DistilBertModel(
            hf.DistilBertConfig(
                vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=HEADS, hidden_dim=48, max_position_embeddings=64
            )
        ),
        "transformer.layer.{}",
        "attention.v_lin",
        "attention.out_lin",
        "post-norm",
        final_norm="sa_layer_norm",
    ),
    "nomic-bert": Family(
        lambda: hf.NomicBertModel(hf.NomicBertConfig(**TEXT)),
        "layers.{}",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "post-norm",
        final_norm="post_attention_layernorm",
        single=True,
        positions="rotary",
    ),
    "jina-embeddings-v3": Family(
        lambda: hf.JinaEmbeddingsV3Model(hf.JinaEmbeddingsV3Config(**TEXT)),
        "layers.{}",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "post-norm",
        final_norm="post_attention_layernorm",
        single=True,
        positions="rotary",
    ),
    "modernbert": Family(
        lambda: hf.ModernBertModel(hf.ModernBertConfig(**TEXT, **SPECIAL, local_attention=4)),
        "layers.{}",
        "attn.Wqkv",
        "attn.Wo",
        "pre-norm",
        values=part(2),
        single=True,
        positions="rotary",
        special=("sliding window",),
    ),
    "eurobert": Family(
        lambda: hf.EuroBertModel(hf.EuroBertConfig(**GROUPED)),
        "layers.{}",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "pre-norm",
        single=True,
        positions="rotary",
        special=("grouped queries",),
    ),
    "t5-encoder": Family(
        lambda: hf.T5EncoderModel(
            hf.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=12, num_layers=2, num_heads=HEADS, d_ff=48)
        ),
        "encoder.block.{}.layer.0",
        "SelfAttention.v",
        "SelfAttention.o",
        "pre-norm",
        single=True,
        positions="relative",
    ),
}
