"""What servers write of one answer: requests and responses of their shapes, with the numbers of a plain forward pass.

vLLM: ``vllm/entrypoints/openai/{completion,chat_completion}/protocol.py``; llama.cpp: ``tools/server/README.md`` and
``server-task.cpp``; SGLang: ``srt/entrypoints/openai/protocol.py`` and the ``/generate`` of its own interface.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

MODEL = "served"


@dataclass(frozen=True)
class Said:
    """An answer to a prompt, or to messages, with the token that ended it."""

    model: Any
    tokenizer: Any
    prompt: list[int]
    answer: list[int]
    end: int
    text: str | None = None
    messages: Sequence[dict[str, Any]] = ()

    @property
    def ids(self) -> list[int]:
        return [*self.answer, self.end]

    @property
    def answer_text(self) -> str:
        return str(self.tokenizer.decode(self.answer))

    def log_probabilities(self) -> list[float]:
        with torch.no_grad():
            logits = self.model(torch.tensor([[*self.prompt, *self.ids]])).logits[0].double().log_softmax(-1)
        return [float(logits[len(self.prompt) + place - 1, token]) for place, token in enumerate(self.ids)]

    def texts(self) -> list[str]:
        return [str(self.tokenizer.decode([token])) for token in self.ids]

    def usage(self) -> dict[str, int]:
        prompt, answer = len(self.prompt), len(self.ids)
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    def entries(self, *, ids: bool = False) -> list[dict[str, Any]]:
        """Tokens as chat completions have them; llama.cpp adds ids."""
        listed = []
        for token, text, number in zip(self.ids, self.texts(), self.log_probabilities(), strict=True):
            entry = {"token": text, "logprob": number, "bytes": list(text.encode())} | ({"id": token} if ids else {})
            listed.append(entry | {"top_logprobs": [dict(entry)]})
        return listed


def completions(said: Said, *, ids: bool = True, echo: bool = False) -> dict[str, Any]:
    """Completions of vLLM and SGLang."""
    request = {"model": MODEL, "prompt": said.text, "max_tokens": 20, "temperature": 0, "logprobs": 1}
    texts, numbers, text = said.texts(), list[float | None](said.log_probabilities()), said.answer_text
    if echo:
        request["echo"] = True
        texts = [*(str(said.tokenizer.decode([token])) for token in said.prompt), *texts]
        numbers = [None, *[-1.0] * (len(said.prompt) - 1), *numbers]
        text = f"{said.text}{text}"
    logprobs = {
        "text_offset": [0] * len(texts),
        "token_logprobs": numbers,
        "tokens": texts,
        "top_logprobs": [None] * len(texts),
    }
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": "stop", "stop_reason": None}
    if ids:
        request["return_token_ids"] = True
        choice |= {"token_ids": said.ids, "prompt_token_ids": said.prompt}
    response = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
    return {"request": request, "response": response | {"usage": said.usage()}}


def named_by_ids(said: Said) -> dict[str, Any]:
    """Completions of vLLM with ``return_tokens_as_token_ids``."""
    record = completions(said, ids=False)
    record["request"]["return_tokens_as_token_ids"] = True
    record["response"]["choices"][0]["logprobs"]["tokens"] = [f"token_id:{token}" for token in said.ids]
    return record


def chat(said: Said, *, ids: bool = True) -> dict[str, Any]:
    """Chat completions of vLLM and SGLang."""
    message = {"role": "assistant", "content": said.answer_text, "refusal": None, "reasoning": None}
    choice = {"index": 0, "message": message, "logprobs": {"content": said.entries()}, "finish_reason": "stop"}
    response = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL, "usage": said.usage()}
    if ids:
        choice["token_ids"] = said.ids
        response["prompt_token_ids"] = said.prompt
    return {"request": {"messages": said.messages, "logprobs": True}, "response": response | {"choices": [choice]}}


def llama_cpp(said: Said, *, tokens: bool = True) -> dict[str, Any]:
    """llama.cpp, ``/completion``: the prompt with the token that begins it, and ids of tokens in any case."""
    return {
        "index": 0,
        "content": said.answer_text,
        "tokens": said.ids if tokens else [],
        "stop": True,
        "prompt": said.tokenizer.decode(said.prompt),
        "tokens_predicted": len(said.ids),
        "tokens_evaluated": len(said.prompt),
        "completion_probabilities": said.entries(ids=True),
    }


def llama_cpp_chat(said: Said) -> dict[str, Any]:
    """llama.cpp, ``/v1/chat/completions``: tokens with ids, none of the prompt."""
    record = chat(said, ids=False)
    record["response"]["choices"][0]["logprobs"]["content"] = said.entries(ids=True)
    return record


def sglang(said: Said) -> dict[str, Any]:
    """SGLang, ``/generate``."""
    rows = [[number, token, None] for number, token in zip(said.log_probabilities(), said.ids, strict=True)]
    meta = {"id": "1", "finish_reason": {"type": "stop"}, "output_token_logprobs": rows, **said.usage()}
    request = {"text": said.text, "sampling_params": {"temperature": 0}, "return_logprob": True}
    return {"request": request, "response": {"text": said.answer_text, "output_ids": said.ids, "meta_info": meta}}


def text_alone(said: Said) -> dict[str, Any]:
    return {"request": {"prompt": said.text}, "response": {"choices": [{"index": 0, "text": said.answer_text}]}}


OF_TEXTS = {
    "vLLM": completions,
    "vLLM without ids": lambda said: completions(said, ids=False),
    "vLLM with echo": lambda said: completions(said, ids=False, echo=True),
    "vLLM, ids for texts": named_by_ids,
    "llama.cpp": lambda said: {"request": {"prompt": said.text}, "response": llama_cpp(said)},
    "llama.cpp alone": llama_cpp,
    "llama.cpp, n_probs": lambda said: llama_cpp(said, tokens=False),
    "SGLang": sglang,
    "text": text_alone,
}
OF_MESSAGES = {
    "vLLM": chat,
    "vLLM without ids": lambda said: chat(said, ids=False),
    "llama.cpp": llama_cpp_chat,
}
