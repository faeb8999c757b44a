"""Reads what a server answered: the exact tokens of a request and its response, and the server's log-probabilities."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from captum_norm.checks import check_number, did_you_mean, quoted, quoted_name
from captum_norm.errors import InvalidInputError
from captum_norm.generation.prompts import Prompt, conversation, read_answer, read_prompt
from captum_norm.generation.result import GenerationResult
from captum_norm.text.lines import read_text
from captum_norm.text.words import token_texts

MAX_GAP = 0.5
"""The largest mean difference in nats that other kernels, precisions and quantisations of one model explain."""

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEMPLATE = ("tools", "documents", "add_generation_prompt", "continue_final_message")
_TAKEN_APART = ("tool_calls", "function_call", "reasoning", "reasoning_content")
_REMEDY = "take the tokenizer that answered, or ask the server for token ids (return_token_ids)"
_Token = tuple[float | None, int | None, str | None]  # log-probability, id and text


@dataclass(frozen=True)
class Response:
    """What a server was asked and what it answered, in the model's tokens.

    Attributes:
        prompt: the prompt, to pass to :meth:`captum_norm.GenerationAttribution.attribute`.
        answer: the token ids of the answer, (R,), without the one that ended it.
        log_probabilities: the server's of each, (R,), None where it gives none.
    """

    prompt: Prompt
    answer: list[int]
    log_probabilities: Sequence[float | None]

    def checked(self, result: GenerationResult, max_gap: float = MAX_GAP) -> GenerationResult:
        """Return a result of this response with the gap between log-probabilities of the server and of the result.

        Raises:
            InvalidInputError: their mean absolute difference is above ``max_gap``, so another model answered.
        """
        pairs = zip(self.log_probabilities[slice(*result.explained.outputs)], result.outputs, strict=False)
        given = [(number, output.probability) for number, output in pairs]
        differences = [abs(a - math.log(max(b, math.ulp(0)))) for a, b in given if a is not None and b is not None]
        gap, note = None, "There was no log-probability of the server to compare with the model's own."
        if differences:
            gap = (math.fsum(differences) / len(differences), max(differences))
            numbers = f"differ by {gap[0]:.2g} nats on average, by {gap[1]:.2g} at most"
            note = f"Log-probabilities of the server and of the model {numbers}."
            if not gap[0] <= check_number("max_gap", max_gap):
                raise InvalidInputError(
                    f"log-probabilities of the server and of {result.explained.model} {numbers}; expected {max_gap:g} "
                    "on average: take the model that answered, and log-probabilities before temperature and penalties"
                )
        result.explained = replace(result.explained, gap=gap, note=f"{result.explained.note} {note}".strip())
        return result


def read_response(source: str | os.PathLike[str] | Mapping[str, Any], tokenizer: Any, *, choice: int = 0) -> Response:
    """Read a request and its response as vLLM, llama.cpp, SGLang and other servers of OpenAI's interfaces write them.

    Token ids are the server's where it gives them. Otherwise the tokenizer and its chat template restore them from
    texts and messages, and must agree with the server's number of prompt tokens and texts of the answer's tokens.

    Args:
        source: a JSON file with ``{"request": {…}, "response": {…}}``, or with a response that has the prompt; or its
            content.
        tokenizer: the model's.
        choice: which of several answers, counted from 0.

    Raises:
        InvalidInputError: this is no such file, it has no prompt or answer, or its tokens are not the tokenizer's.

    Example:
        >>> from captum_norm.loading import LANGUAGE_MODEL, load_tokenizer
        >>> choice = {"text": " a", "logprobs": {"tokens": [" a"], "token_logprobs": [-0.1]}}
        >>> source = {"request": {"prompt": "Clara found"}, "response": {"choices": [choice]}}
        >>> read_response(source, load_tokenizer(LANGUAGE_MODEL)).log_probabilities
        [-0.1]
    """
    content = parsed(read_text(source), os.fspath(source)) if isinstance(source, str | os.PathLike) else source
    request, answer = _sides(content, choice)
    prompt, tokens, text = _prompt(request, answer, tokenizer), _tokens(answer), _text(request, answer)
    if request.get("echo") is True:
        tokens = tokens[len(prompt.ids) :]
    ids = _ids(answer, "token_ids") or _ids(answer, "output_ids") or _ids(answer, "tokens")
    ids = ids or [number for _, number, _ in tokens if number is not None]
    if not ids and text is None:
        raise InvalidInputError(f"got an answer without text, or with tool calls or reasoning cut out of it; {_REMEDY}")
    ids = ids or read_answer(text, prompt, tokenizer)
    _check_tokens(tokens, ids, text, tokenizer)
    if len(ids) > 1 and (ids[-1] in tokenizer.all_special_ids or _decoded(ids[:-1], tokenizer) == text):
        ids = ids[:-1]
    given = [number for number, _, _ in tokens[: len(ids)]]
    return Response(prompt, ids, [*given, *[None] * (len(ids) - len(given))])


def parsed(text: str, called: str) -> Any:
    """Parse JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{quoted_name(called)} is not JSON that can be read: {error}") from error


def _sides(source: Any, number: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return a request, and one answer with what its response says of all."""
    # In a response, SGLang's "text" is the answer.
    request, response = dict(source, text=None) if isinstance(source, Mapping) else {}, source
    if "response" in request:
        request, response = _entry(request, "request", dict) or {}, request["response"]
    general = response if isinstance(response, Mapping) else {}
    listed = general.get("choices", [general] if general else response)
    if general.get("error") or not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise InvalidInputError(f"got the response {quoted(response)}; expected an object with the server's answer")
    if not 0 <= number < len(listed):
        raise InvalidInputError(f"got choice {number} of a response that has {len(listed)}, counted from 0")
    return request, {**general, **{name: entry for name, entry in listed[number].items() if entry is not None}}


def _entry(record: Mapping[str, Any], name: str, kind: Any) -> Any:
    """Return an entry of a type, or None."""
    if isinstance(value := record.get(name), kind | None):
        return value
    expected = {list: "a list", dict: "an object", str: "a text"}[kind]
    raise InvalidInputError(f"got {name}={quoted(value)} in a request or response; expected {expected}")


def _objects(record: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a list of objects; an empty one if there is none."""
    return [_entry({name: entry}, name, dict) or {} for entry in _entry(record, name, list) or []]


def _ids(record: Mapping[str, Any], name: str) -> list[int]:
    """Return a list of token ids; an empty one if there is none."""
    ids: list[int] = _entry(record, name, list) or []
    if all(type(token) is int and 0 <= token < 2**31 for token in ids):
        return ids
    raise InvalidInputError(f"got {name}={quoted(ids)} in a request or response; expected token ids")


def _tokens(answer: Mapping[str, Any]) -> list[_Token]:
    """Return the answer's tokens as the server names them, none if it does not."""
    logprobs, meta = (_entry(answer, name, dict) or {} for name in ("logprobs", "meta_info"))
    texts, numbers = (_entry(logprobs, name, list) or [] for name in ("tokens", "token_logprobs"))
    rows = _entry(meta, "output_token_logprobs", list) or [
        [entry.get("logprob"), entry.get("id"), entry.get("token")]
        for entry in _objects(logprobs, "content") or _objects(answer, "completion_probabilities")
    ]
    return list(map(_token, rows or [[number, None, text] for number, text in zip(numbers, texts, strict=False)]))


def _token(row: Any) -> _Token:
    """Read the log-probability, id and text of a token, as SGLang writes them, the text perhaps left out."""
    number, token, text, *_ = [*row, None] if isinstance(row, list) and len(row) > 1 else [row] * 3
    if isinstance(text, str) and (named := re.fullmatch(r"token_id:(\d{1,9})", text)):  # vLLM, if it is asked to
        token, text = int(named[1]), None
    if isinstance(number, float | int | None) and isinstance(token, int | None) and isinstance(text, str | None):
        return number, token, text
    raise InvalidInputError(f"got {quoted(row)} as a token of a response; expected its log-probability, id and text")


def _prompt(request: Mapping[str, Any], answer: Mapping[str, Any], tokenizer: Any) -> Prompt:
    """Return the prompt with the server's token ids, or those of a text or of messages."""
    given = request.get("prompt", request.get("text"))
    given = given[0] if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int) else given
    ids = _ids(answer, "prompt_token_ids") or _ids(request, "input_ids")
    ids, known = ids or ([] if isinstance(given, str) else _ids({"prompt": given}, "prompt")), None
    try:
        known = _conversation(request, tokenizer) or (read_prompt(given, tokenizer) if isinstance(given, str) else None)
    except InvalidInputError:
        if not ids:
            raise
    if ids and (known is None or known.ids != ids):
        texts = token_texts(ids, tokenizer)
        ends = list(accumulate(map(len, texts)))
        return Prompt(ids, "".join(texts), [(end - len(text), end) for text, end in zip(texts, ends, strict=True)])
    if known is None:
        raise InvalidInputError("got a response without its prompt; expected {'request': {…}, 'response': {…}}")
    meta = _entry(answer, "meta_info", dict) or _entry(answer, "usage", dict) or {}
    count = answer.get("tokens_evaluated", meta.get("prompt_tokens", len(known.ids)))
    if count == len(known.ids) - 1 and known.ids[:2] == [tokenizer.bos_token_id] * 2 and known.offsets is not None:
        return replace(known, ids=known.ids[1:], offsets=known.offsets[1:])  # llama.cpp shows the first one
    if count != len(known.ids):
        raise InvalidInputError(f"the server's prompt has {count} tokens, the tokenizer's {len(known.ids)}; {_REMEDY}")
    return known


def _conversation(request: Mapping[str, Any], tokenizer: Any) -> Prompt | None:
    """Tokenize the messages of a request with its variables of the chat template; None without messages."""
    turns = [{"content": None, **message} for message in _objects(request, "messages")]
    for role in (turn.get("role") for turn in turns):
        if role not in _ROLES:
            meant = did_you_mean(role, _ROLES)
            raise InvalidInputError(f"got the role {quoted(role)}; expected {', '.join(_ROLES)}{meant}")
    variables = {name: request[name] for name in _TEMPLATE if request.get(name) is not None}
    variables |= _entry(request, "chat_template_kwargs", dict) or {}
    if "chat_template" in {**request, **variables}:
        raise InvalidInputError(f"got a request with a chat template of its own; {_REMEDY}")
    return conversation(turns, tokenizer, **variables) if turns else None


def _text(request: Mapping[str, Any], answer: Mapping[str, Any]) -> str | None:
    """Return the answer's text; None if there is none, or the server took it apart."""
    message = _entry(answer, "message", dict) or answer
    text, prompt = _entry(message, "content", str) or _entry(answer, "text", str), request.get("prompt")
    if request.get("echo") is True:
        text = text.removeprefix(prompt) if isinstance(prompt, str) and text is not None else None
    return None if any(message.get(name) for name in _TAKEN_APART) else text


def _check_tokens(tokens: Sequence[_Token], ids: Sequence[int], text: str | None, tokenizer: Any) -> None:
    """Refuse tokens that are others for the tokenizer than for the server."""
    for place, ((_, number, named), known) in enumerate(zip(tokens, ids, strict=False)):
        theirs, ours = (named or "").strip(), _decoded([known], tokenizer).strip()
        # Characters of several tokens are written in many ways.
        comparable = theirs and ours and "�" not in theirs + ours and not theirs.startswith("bytes:")
        if number not in (None, known) or (comparable and theirs != ours):
            of, at = quoted(named or number), f"token {place} of the answer"
            raise InvalidInputError(f"{at} is {of} for the server, but {quoted(ours)} for the tokenizer; {_REMEDY}")
    said, decoded = ("".join(words.split()) for words in (text or "", _decoded(ids, tokenizer)))
    if not tokens and said not in decoded:
        raise InvalidInputError(f"the server answered {quoted(text)}, but its tokens are {quoted(decoded)}; {_REMEDY}")


def _decoded(ids: Sequence[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
