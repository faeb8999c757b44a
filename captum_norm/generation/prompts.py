"""Turns prompts, conversations and answers into tokens, and groups a prompt's tokens into segments."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from captum_norm.checks import check_entries, did_you_mean, quoted
from captum_norm.errors import InvalidInputError
from captum_norm.text.words import Span, joined_spans, word_spans

Message = Mapping[str, Any]
"""A turn of a conversation: its ``role`` and its ``content``, a text or parts of one; perhaps ``tool_calls``."""

SegmentKind = Literal["word", "sentence", "line", "paragraph", "message"]
Segmentation = SegmentKind | Sequence[str]
"""How to group a prompt's tokens: by kind, or as these pieces of its text, in their order."""

# A sentence ends at a full stop, question or exclamation mark, with closing quotes, before a space; or at a line's end.
_BETWEEN: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "sentence": re.compile(r"(?<=[.!?…])[\"'”’»)\]]*\s+|(?<=[。！？])|\n+"),
        "line": re.compile(r"\n+"),
        "paragraph": re.compile(r"\n\s*\n"),
    }
)


@dataclass(frozen=True)
class Prompt:
    """A prompt in tokens; of a conversation with the characters and the role of each turn's content and tool calls."""

    ids: list[int]
    text: str | None = None  # None if ids were given
    offsets: Sequence[Span] | None = None  # of each token in the text, (0, 0) if special; None if not known
    messages: Sequence[Span] = ()
    roles: Sequence[str] = ()

    @property
    def template(self) -> list[bool]:
        """Which tokens a chat template added; none without one."""
        if not self.messages or self.offsets is None:
            return [False] * len(self.ids)
        return [not any(_overlap(token, message) for message in self.messages) for token in self.offsets]


def read_prompt(prompt: Any, tokenizer: Any, *, continued: bool = True) -> Prompt:
    """Tokenize a prompt, without a closing token if the model continues it: a text, messages, or token ids (1, N)."""
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, Tensor):
        ids = prompt.reshape(-1).tolist() if prompt.dim() == 1 or (prompt.dim() == 2 and len(prompt) == 1) else []
        if not ids or prompt.is_floating_point():
            raise InvalidInputError(
                f"got a prompt of shape {tuple(prompt.shape)} and {prompt.dtype}; expected the token ids of one text"
            )
        return Prompt(ids)
    if isinstance(prompt, str):
        plain = _tokenized(prompt, tokenizer, special=True, continued=continued)
        if not prompt.strip() or not plain.ids:
            raise InvalidInputError(f"got the prompt {quoted(prompt)}; expected some words")
        return plain
    if isinstance(prompt, Sequence) and prompt and all(_is_message(message) for message in prompt):
        return conversation(prompt, tokenizer)
    raise InvalidInputError(
        f"got the prompt {quoted(prompt)}; expected a text, token ids, or messages [{{'role': 'user', 'content': '…'}}]"
    )


def read_answer(answer: Any, prompt: Prompt, tokenizer: Any, *, continued: bool = True) -> list[int]:
    """Tokenize an answer as it follows a prompt, whose last token must not change; token ids are taken as they are."""
    if isinstance(answer, str):
        ids = _following(answer, prompt, tokenizer) if continued else _translated(answer, tokenizer)
    elif isinstance(answer, Tensor) and answer.dim() == 1 and not answer.is_floating_point():
        ids = answer.tolist()
    elif isinstance(answer, Sequence) and all(isinstance(token, int) for token in answer):
        ids = list(answer)
    else:
        raise InvalidInputError(f"got the answer {quoted(answer)}; expected a text, or its token ids, (R,)")
    if not ids:
        raise InvalidInputError(
            f"got the answer {quoted(answer)}, which has no tokens; give a text, or None to generate an answer"
        )
    return ids


def check_ids(ids: Sequence[int], vocabulary: int, longest: int | None, model: str) -> None:
    """Refuse ids that the model does not know, and more of them than it takes."""
    if max(ids) >= vocabulary or min(ids) < 0:
        wrong = max(ids) if max(ids) >= vocabulary else min(ids)
        raise InvalidInputError(
            f"got the token id {wrong}, but {model} has {vocabulary} embeddings; take the model's own tokenizer"
        )
    if longest is not None and len(ids) > longest:
        raise InvalidInputError(
            f"got {len(ids)} tokens, but {model} takes at most {longest}; shorten the prompt or answer"
        )


def span_of(outputs: object, texts: Sequence[str], answer: str) -> Span:
    """Return the answer's tokens to explain, first and one behind the last, from (start, end) or a part of its text."""
    count = len(texts)
    if outputs is None:
        return 0, count
    if isinstance(outputs, str):
        times = answer.count(outputs) if outputs else 0
        if times != 1:
            raise InvalidInputError(
                f"got outputs={quoted(outputs)}, which is {times} times in the answer {quoted(answer)}; expected a "
                "part of it that is there once, or (start, end) in tokens"
            )
        first = answer.index(outputs)
        spans = pairwise(accumulate(map(len, texts), initial=0))
        inside = [place for place, span in enumerate(spans) if _overlap(span, (first, first + len(outputs)))]
        return inside[0], inside[-1] + 1
    if isinstance(outputs, tuple) and len(outputs) == 2 and all(isinstance(place, int) for place in outputs):
        start, end = outputs
        if 0 <= start < end <= count:
            return start, end
    raise InvalidInputError(
        f"got outputs={quoted(outputs)} of an answer of {count} tokens; expected 0 ≤ start < end ≤ {count}, or a part "
        "of the answer's text"
    )


def _following(answer: str, prompt: Prompt, tokenizer: Any) -> list[int]:
    """Tokenize an answer that continues the prompt."""
    if prompt.text is None:
        return list(tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"])
    ids = _open_ended(prompt.text + answer, tokenizer, special=not prompt.messages)["input_ids"]
    if ids[: len(prompt.ids)] != prompt.ids:
        raise InvalidInputError(
            f"got the answer {quoted(answer)}, whose beginning merges with the prompt's last token; begin it with a "
            "space, end the prompt elsewhere, or pass token ids"
        )
    return ids[len(prompt.ids) :]


def _translated(answer: str, tokenizer: Any) -> list[int]:
    """Tokenize an answer in the target language, without what closes it."""
    ids, plain = (
        list(tokenizer(text_target=answer, add_special_tokens=special, verbose=False)["input_ids"])
        for special in (True, False)
    )
    return ids[: len(ids) - _closing(ids, plain)]


def _tokenized(text: str, tokenizer: Any, *, special: bool, continued: bool) -> Prompt:
    options = {"return_offsets_mapping": bool(getattr(tokenizer, "is_fast", False)), "verbose": False}
    if continued:
        encoded = _open_ended(text, tokenizer, special=special, **options)
    else:
        encoded = tokenizer(text, add_special_tokens=special, **options)
    offsets = encoded.get("offset_mapping")
    return Prompt(list(encoded["input_ids"]), text, None if offsets is None else [tuple(span) for span in offsets])


def _open_ended(text: str, tokenizer: Any, *, special: bool, **options: Any) -> dict[str, list[Any]]:
    """Tokenize a text that goes on, without the special tokens that the tokenizer puts behind one."""
    encoded = tokenizer(text, add_special_tokens=special, **options)
    ids = encoded["input_ids"]
    plain = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if special else ids
    count = len(ids) - _closing(ids, plain)
    return {name: list(encoded[name])[:count] for name in ("input_ids", "offset_mapping") if name in encoded}


def _closing(ids: Sequence[int], plain: Sequence[int]) -> int:
    """Count the tokens that a tokenizer adds behind those of the text alone; a special token in the text is none."""
    added = len(ids) - len(plain)
    before = (first for first in range(added + 1) if list(ids[first : first + len(plain)]) == list(plain))
    return added - next(before, added)


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message


def conversation(messages: Sequence[Message], tokenizer: Any, **template: Any) -> Prompt:
    """Tokenize a conversation as the chat template writes it, which also gets the variables ``template``."""
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInputError(
            f"got a conversation, but {type(tokenizer).__name__} has no chat template; pass the prompt as one text, or "
            "set tokenizer.chat_template"
        )
    turns = [_turn(message) for message in messages]
    text = _rendered(turns, tokenizer, template)
    spans, roles = _turns(turns, text, tokenizer, template)
    return replace(_tokenized(text, tokenizer, special=False, continued=True), messages=spans, roles=roles)


def _turn(message: Message) -> dict[str, Any]:
    """Return a message with its content as one text, and the arguments of tool calls, JSON for servers, as objects."""
    try:
        turn = {name: copy.deepcopy(entry) for name, entry in message.items() if entry or name == "content"}
        for function in (call["function"] for call in turn.get("tool_calls", ())):
            if isinstance(function["arguments"], str):
                function["arguments"] = json.loads(function["arguments"])
            function["name"] += ""
        parts = turn["content"] if isinstance(turn["content"], list) else [{"text": turn["content"]}]
        return turn | {"content": "\n".join(part["text"] for part in parts if part["text"] or "tool_calls" not in turn)}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(
            f"got the {message['role']}'s turn {quoted(message)}; expected a content that is a text, and tool_calls "
            "[{'function': {'name': …, 'arguments': JSON}}]"
        ) from error


def _rendered(turns: Sequence[Message], tokenizer: Any, template: Mapping[str, Any]) -> str:
    try:
        return str(tokenizer.apply_chat_template(turns, **{"add_generation_prompt": True, **template}, tokenize=False))
    except Exception as error:  # templates raise what they like
        reason = " ".join(str(error).split())[:200]
        raise InvalidInputError(f"the chat template refuses the conversation: {reason}") from error


def _turns(turns: list[dict[str, Any]], text: str, tokenizer: Any, template: Any) -> tuple[list[Span], list[str]]:
    """Find contents and tool calls in the rendered text, between what the template puts around marks of contents."""
    # The words of a turn may be the template's own, such as "user".
    said = [
        place for place, turn in enumerate(turns) if turn["content"].strip() or not (place and "tool_calls" in turn)
    ]
    marks = {place: {"content": f"\ue000{place}\ue001"} for place in said}
    marked = [turn | marks.get(place, {}) for place, turn in enumerate(turns)]
    first, *frame = re.split("\ue000(\\d+)\ue001", _rendered(marked, tokenizer, template))
    order, behind = frame[::2], frame[1::2]
    in_order = order == [str(index) for index in said] and text.startswith(first)
    place, spans, roles = len(first), list[Span](), list[str]()
    for number, index in enumerate(said):
        content, role = turns[index]["content"], turns[index]["role"]
        # The template may strip it.
        forms = (content, content.strip(), content.lstrip(), content.rstrip()) if in_order and content.strip() else ()
        form = next((form for form in forms if text.startswith(form + behind[number], place)), None)
        if form is None:
            raise InvalidInputError(
                f"the content of the {role}'s turn {quoted(content)} is empty, or the chat template changes "
                "it, so its tokens are not known; pass the prompt as one text"
            )
        spans.append(_stripped(text, place, place + len(form)))
        roles.append(role)
        place += len(form) + len(behind[number])
        for turn in turns[index : [*said, len(turns)][number + 1]]:
            for call in turn.get("tool_calls", ()):
                spans.append(_span_of_call(call["function"], text, spans[-1][1], place))
                roles.append(f"call of {call['function']['name']}")
    return spans, roles


def _span_of_call(call: Mapping[str, Any], text: str, start: int, end: int) -> Span:
    """Find a tool call between two places of a text, from its name to the last word of its arguments."""
    first = text.find(call["name"], start, end)
    if first < 0:
        raise InvalidInputError(f"the chat template leaves out the call of {quoted(call['name'])}; pass one text")
    last = first + len(call["name"])
    for word in re.findall(r"\w+", json.dumps(call["arguments"], ensure_ascii=False)):
        place = text.find(word, last, end)
        last = last if place < 0 else place + len(word)
    return first, last


def segments_of(
    prompt: Prompt, segmentation: Segmentation, what: str = "segments"
) -> tuple[Sequence[str], Sequence[int]]:
    """Return the text of each segment, or the role of a turn, and the segment of each token, −1 for none."""
    if prompt.text is None or prompt.offsets is None:
        raise InvalidInputError(
            f"got {what}=, but the tokens' characters are not known: pass the prompt as a text, with a fast tokenizer"
        )
    if isinstance(segmentation, str) and segmentation == "message":
        names, spans = list(prompt.roles), list(prompt.messages)
        if not spans:
            raise InvalidInputError(
                'got segments="message" and no conversation; pass messages, [{"role": "user", "content": "…"}]'
            )
    else:
        spans = _segment_spans(prompt.text, prompt.messages or [(0, len(prompt.text))], segmentation, what)
        if isinstance(segmentation, str) and segmentation == "word":
            spans = joined_spans(spans, prompt.offsets)
        names = [prompt.text[start:end] for start, end in spans]
    numbers = [_segment_of(prompt.text, token, spans) for token in prompt.offsets]
    missing = [name for index, name in enumerate(names) if index not in numbers]
    if missing:
        one = what.removesuffix("s")
        raise InvalidInputError(f"the {one} {quoted(missing[0])} has no token of its own; join it with a neighbour")
    return names, numbers


def with_space(prompt: Prompt, numbers: Sequence[int]) -> list[int]:
    """Give each segment the tokens of white space behind it, unless a chat template added them."""
    found = list(numbers)
    if prompt.text is not None and prompt.offsets is not None:
        for place, ((start, end), added) in enumerate(zip(prompt.offsets, prompt.template, strict=True)):
            if place and found[place] < 0 and not added and prompt.text[start:end].isspace():
                found[place] = found[place - 1]
    return found


def without_context(prompt: Prompt, context: str | Sequence[str]) -> list[int]:
    """Return a prompt's tokens without those of some pieces of its text, and of the white space behind them."""
    _, numbers = segments_of(prompt, [context] if isinstance(context, str) else context, "context")
    rest = [token for token, number in enumerate(with_space(prompt, numbers)) if number < 0]
    text, offsets, template = prompt.text or "", prompt.offsets or (), prompt.template
    words = [text[slice(*offsets[token])] for token in rest if not template[token]]
    if len(rest) == len(numbers) or not "".join(words).strip():
        raise InvalidInputError(
            f"got the context {quoted(context)}, which is all or nothing of the prompt; pass a part of it"
        )
    return [prompt.ids[token] for token in rest]


def _segment_spans(text: str, parts: Sequence[Span], segmentation: Segmentation, what: str) -> list[Span]:
    """Find the characters of each segment: of a kind in each part of the text, or of a list in all of it."""
    if isinstance(segmentation, str) and segmentation == "word":
        return [span for part in parts for span in word_spans(text, *part)]
    spans: list[Span] = []
    if isinstance(segmentation, str):
        if segmentation not in _BETWEEN:
            raise InvalidInputError(
                f"got segments={quoted(segmentation)}; expected word, {', '.join(_BETWEEN)}, message, or a list of "
                f"their texts{did_you_mean(segmentation, ('word', *_BETWEEN, 'message'))}"
            )
        for start, end in parts:
            matches = list(_BETWEEN[segmentation].finditer(text, start, end))
            begins, ends = [start, *(match.end() for match in matches)], [*(match.start() for match in matches), end]
            pieces = [_stripped(text, *piece) for piece in zip(begins, ends, strict=True)]
            spans += [(first, last) for first, last in pieces if first < last]
        return spans
    for piece in check_entries(f"the {what}", segmentation, "their texts"):
        behind = spans[-1][1] if spans else 0
        if not isinstance(piece, str) or not piece.strip() or (first := text.find(piece, behind)) < 0:
            raise InvalidInputError(
                f"the {what.removesuffix('s')} {quoted(piece)} is not in the prompt, or not behind the one before it; "
                f"give the texts of the {what} in the prompt's order"
            )
        spans.append((first, first + len(piece)))
    return spans


def _segment_of(text: str, token: Span, spans: Sequence[Span]) -> int:
    """Find the segment of a token's first character that is no white space, if it has one; −1 without one."""
    start, end = token
    first, last = _stripped(text, start, end)
    place = first if first < last else start
    return next((index for index, (begin, stop) in enumerate(spans) if begin <= place < stop and start < end), -1)


def _stripped(text: str, start: int, end: int) -> Span:
    """Return the characters of a piece of text without white space around it."""
    piece = text[start:end]
    begin = start + len(piece) - len(piece.lstrip())
    return begin, begin + len(piece.strip())


def _overlap(left: Span, right: Span) -> bool:
    return max(left[0], right[0]) < min(left[1], right[1])
