"""A tokenizer of whole words and bytes, with a chat template, and language models that fit it."""

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "Anna owns a red boat. Paul found an old ring in the garden.\nWhat does Anna own? Anna owns a red boat."
CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PROMPT, ANSWER = "Anna owns a red boat. Paul found", " an old ring in the garden."
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]


@cache
def tokenizer() -> Any:
    """Byte-level BPE, which begins each text with <s>, so that words of :data:`TEXT` are single tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", *ROLES]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT] * 4, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    found = PreTrainedTokenizerFast(tokenizer_object=made, **names)  # type: ignore[no-untyped-call]
    found.chat_template = CHAT
    return found


def encoded(text: str) -> Tensor:
    ids: Tensor = tokenizer()(text, return_tensors="pt")["input_ids"]
    return ids


def tokens_of_answer() -> list[int]:
    ids: list[int] = encoded(PROMPT + ANSWER)[0, encoded(PROMPT).shape[1] :].tolist()
    return ids


@cache
def gpt2(seed: int = 1) -> Any:
    """A GPT-2 with weights that are not small."""
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=len(tokenizer()), n_positions=64, n_embd=24, n_layer=3, n_head=4)
    return _shaken(GPT2LMHeadModel(config))


@cache
def llama(seed: int = 1) -> Any:
    """A LLaMA with grouped queries."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer()), max_position_embeddings=64, hidden_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=32, attention_bias=True,
    )  # fmt: skip
    return _shaken(LlamaForCausalLM(config))


def _shaken(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval()
