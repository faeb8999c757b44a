"""Configures the quantisation of a model as it is loaded."""

from typing import Any, Literal, get_args

from captum_norm.arguments import one_of

Quantization = Literal["int8", "nf4", "fp4"]
"""How bitsandbytes stores the weights of linear maps: in 8 bits (LLM.int8), or in 4 of one of two kinds."""


def quantized(quantization: Quantization | None) -> Any:
    """The configuration of transformers for a quantisation."""
    from transformers import BitsAndBytesConfig

    if quantization is None:
        return None
    one_of("quantization", quantization, get_args(Quantization))
    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=quantization)  # type: ignore[no-untyped-call]
