"""Configures the quantisation of a model as it is loaded."""

from typing import TYPE_CHECKING, Any, Literal, get_args

from captum_norm.checks import one_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Quantization = Literal["int8", "nf4", "fp4"]
"""How bitsandbytes stores the weights of linear maps: in 8 bits (LLM.int8), or in 4 of one of two kinds."""


# Kernels of bitsandbytes for processors take 4-bit weights of so many rows at a time, and no fewer.
_ROWS = 32


def quantized(quantization: Quantization, empty: "PreTrainedModel | None" = None) -> Any:
    """The configuration of transformers for a quantisation.

    Args:
        quantization: the kind.
        empty: the model, without its weights, whose head is left as it is; None for the default of transformers, which
            quantises a head with a bias.
    """
    from torch.nn import Linear
    from transformers import BitsAndBytesConfig

    one_of("quantization", quantization, get_args(Quantization))
    options: dict[str, Any] = {}
    if empty is not None:
        last = empty.get_output_embeddings()  # type: ignore[no-untyped-call]
        options["llm_int8_skip_modules"] = [
            name
            for name, module in empty.named_modules()
            if module is last or (isinstance(module, Linear) and module.out_features % _ROWS)
        ]
    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, **options)  # type: ignore[no-untyped-call]
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=quantization, **options)  # type: ignore[no-untyped-call]
