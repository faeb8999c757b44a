"""Why architectures are refused: one table, for messages, the documentation and the tests."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Refusal:
    """One reason.

    Attributes:
        model_types: the ``model_type`` of the configurations of architectures that are refused for it.
        modules: names of classes of modules that only these models have.
        reason: the reason, and what can be done.
        beside: names of classes of modules, one of which these models have, too; empty if any model may.
    """

    model_types: tuple[str, ...]
    modules: tuple[str, ...]
    reason: str
    beside: tuple[str, ...] = ()


REFUSALS = (
    Refusal(
        ("xlnet",),
        ("XLNetRelativeAttention",),
        "its projections are parameters in einsum, not modules whose inputs and outputs can be observed",
    ),
    Refusal(
        ("longformer",),
        ("LongformerSelfAttention",),
        "it attends in windows and, from some tokens, globally, without a matrix of weights over the sequence",
    ),
    Refusal(
        ("led", "longt5", "pegasus_x"),
        (
            "LEDEncoderSelfAttention",
            "LongT5LocalAttention",
            "LongT5TransientGlobalAttention",
            "PegasusXGlobalLocalAttention",
        ),
        "its encoder attends in windows and to global tokens, without a matrix of weights over the sequence; the "
        'decoder can be explained: NormMeter.measure(…, stacks=["decoder", "cross"])',
    ),
    Refusal(
        ("big_bird", "bigbird_pegasus"),
        ("BigBirdBlockSparseAttention", "BigBirdPegasusBlockSparseAttention"),
        'it attends in sparse blocks; with attention_type="original_full" it attends over the whole sequence',
    ),
    Refusal(
        ("mobilebert",),
        ("MobileBertSelfAttention",),
        "its norms (NoNorm) scale and shift without statistics, and several feed-forward networks follow each other "
        "between two bottlenecks",
    ),
    Refusal(
        ("squeezebert",),
        ("SqueezeBertSelfAttention",),
        "its affine maps are convolutions over tensors (batch, width, positions)",
    ),
    Refusal(
        ("convbert",),
        ("ConvBertSelfAttention",),
        "half of its heads are convolutions with kernels made from the input, not sums over weighted keys",
    ),
    Refusal(
        ("funnel",),
        ("FunnelRelMultiheadAttention",),
        "it pools positions, so later layers have fewer of them than the input",
    ),
    Refusal(
        ("canine",),
        ("CanineSelfAttention",),
        "its layers attend over characters in windows, then over shorter sequences of them",
    ),
    Refusal(
        ("prophetnet",),
        ("ProphetNetNgramSelfAttention", "ProphetNetAttention"),
        "its decoder has a stream of hidden states for each predicted token, each with attention of its own",
    ),
    Refusal(("ibert",), ("IBertSelfAttention",), "quantisation stands between attention and its output projection"),
    Refusal(
        ("nystromformer",),
        ("NystromformerSelfAttention",),
        "it approximates attention by landmarks; a weight of one position for another does not exist",
    ),
    Refusal(
        ("fnet", "mamba", "falcon_mamba", "rwkv"),
        ("FNetFourierTransform", "MambaMixer", "FalconMambaMixer", "RwkvSelfAttention"),
        "it has no attention: positions are mixed by a Fourier transform, a state-space model or a recurrence",
    ),
    Refusal(
        ("jetmoe",),
        ("JetMoeAttention",),
        "each token has output projections of its own, those of the experts that it is routed to",
    ),
    Refusal(
        ("diffllama",),
        ("DiffLlamaAttention",),
        "its layers call attention twice and subtract the results before the output projection",
    ),
    Refusal(
        ("granite_swa", "granitemoe_swa"),
        ("GraniteSWAAttention", "GraniteMoeSWAAttention"),
        "its attention function scales the output by a sink and returns the weights without it",
    ),
    Refusal(
        ("gpt_neox_japanese",),
        ("GPTNeoXJapaneseAttention",),
        "its last layer adds a bias behind the output projection that belongs to no module",
    ),
    Refusal(
        ("zamba2",),
        ("Zamba2AttentionDecoderLayer",),
        "its attention reads two streams at once and is added to none: a feed-forward network reads its output alone",
    ),
    Refusal(
        ("falcon_h1",),
        ("FalconH1DecoderLayer",),
        "one sum adds attention and a state-space model, each times a number, to the residual stream",
    ),
    Refusal(
        ("gemma3n_text",),
        ("Gemma3nTextDecoderLayer",),
        "it has four residual streams, and scales the sum of attention's output and that of a second path (LAuReL)",
    ),
    Refusal(
        ("kosmos-2",),
        ("Kosmos2ImageToTextProjection",),
        "between image and text, queries of its own attend outside of any layer: their output joins no residual stream",
    ),
    Refusal(
        ("git",),
        ("GitSelfAttention",),
        "its text model attends in code of its own, in the file whose vision model calls the attention interface",
    ),
    Refusal(
        ("florence2",),
        ("Florence2VisionBackbone",),
        "its encoder reads an image tower's output among its tokens; the encoder–decoder alone can be explained: "
        "model.model.language_model, with inputs_embeds and decoder_input_ids",
    ),
    Refusal(
        ("blip-2 (T5)", "instructblip (T5)"),
        ("Blip2QFormerLayer", "InstructBlipQFormerLayer"),
        "its encoder reads an image tower's output among its tokens; the encoder–decoder alone can be explained: "
        "model.language_model, with inputs_embeds and decoder_input_ids",
        beside=("T5Block",),
    ),
    Refusal(
        ("wavlm",),
        ("WavLMAttention",),
        "its attention is torch.nn.functional.multi_head_attention_forward, which calls no module for its projections",
    ),
    Refusal(
        ("wav2vec2-conformer",),
        ("Wav2Vec2ConformerEncoderLayer",),
        "a convolution and half a feed-forward network follow attention in a layer",
    ),
    Refusal(
        ("swin", "swinv2", "donut-swin", "sam_vision_model", "sam_hq_vision_model", "hiera"),
        (
            "SwinAttention",
            "Swinv2Attention",
            "DonutSwinAttention",
            "SamVisionAttention",
            "SamVisionSdpaAttention",
            "SamHQVisionAttention",
            "SamHQVisionSdpaAttention",
            "HieraMaskUnitAttention",
        ),
        "it attends within windows of patches, each a sequence of its own, with no weights over the image",
    ),
    Refusal(
        ("segformer", "pvt", "pvt_v2"),
        ("SegformerAttention", "PvtSelfAttention", "PvtV2SelfAttention"),
        "its keys are not the patches but fewer ones that a convolution merged",
    ),
    Refusal(
        ("mlcd_vision_model",),
        ("MLCDAttention",),
        "its layers receive (batch, positions, width) and its output projection (positions, batch, width)",
    ),
)


WITHOUT_FEED_FORWARD = (
    Refusal(
        ("xmod",),
        ("XmodAdapter",),
        "a language adapter, a second network with its own residual connection, follows it, and no scope names what is "
        "between the two",
    ),
    Refusal(
        ("nllb-moe", "switch_transformers"),
        ("NllbMoeExperts", "SwitchTransformersExperts"),
        "each expert is a module of its own that is called with the positions routed to it",
    ),
    Refusal(
        ("embedding_gemma2_text",),
        ("EmbeddingGemma2TextPLEBlock",),
        "embeddings of the layer's own and a further factor follow it",
    ),
    Refusal(("openai_privacy_filter",), ("OpenAIPrivacyFilterExperts",), "a number multiplies the sum of its experts"),
    Refusal(
        ("minimax_m3_vl_text",),
        ("MiniMaxM3VLExperts",),
        "a number multiplies the sum of its routed experts before the shared one's output is added",
    ),
    Refusal(
        ("granitemoeshared", "granitemoehybrid"),
        ("GraniteMoeSharedExperts", "GraniteMoeHybridExperts"),
        "no module shows the sum of its routed and shared experts",
    ),
    Refusal(("bitnet",), ("BitNetMLP",), "a norm stands between its activation and its second map"),
)
"""Why layers that are understood up to attention have no scopes through the feed-forward network."""


def refusal_of(model: nn.Module, table: Sequence[Refusal] = REFUSALS) -> str | None:
    """Return why a model is refused, or the reason of another table; None if it is not in the table."""
    classes = {type(module).__name__ for module in model.modules()}
    fitting = (refusal for refusal in table if not classes.isdisjoint(refusal.modules))
    return next((row.reason for row in fitting if not row.beside or not classes.isdisjoint(row.beside)), None)
