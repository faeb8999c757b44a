"""Describes one call of a model, which can be run, cut to some examples or positions, and repeated."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from captum_norm.errors import CaptumNormError, InvalidInputError
from captum_norm.models.attention import AttentionCall, AttentionFunction
from captum_norm.models.caches import CACHE, copied, selected
from captum_norm.models.hooks import evaluating, modules_of
from captum_norm.models.libraries.library import Library, forward_parameters
from captum_norm.models.model import Model, no_attention
from captum_norm.models.pictures import PIXELS, Pictures, gathering_chunks, of_examples, read_pictures
from captum_norm.models.stacks import EXTENDED, ROWED, Role, Stacks
from captum_norm.models.wrappers import config_of

FEW = "logits_to_keep"
WATCH: ContextVar[Callable[["ModelCall", Any], None] | None] = ContextVar("WATCH", default=None)
"""What is shown the calls that methods explain, and what the model returned; None if nobody asks."""

TokenTexts = Sequence[Sequence[str]] | None
"""The texts of each example's tokens, if they are known."""


@dataclass(frozen=True)
class Positions:
    """Positions of one input sequence, the encoder's or the decoder's."""

    length: int | None = None  # None if it is unknown or the input is no sequence (an image)
    real: Tensor | None = None  # True at real positions, (B, S); None without padding
    shift: Tensor | None = None  # how far each example was shifted left to begin at position 0, (B,); None if none was
    before: int = 0  # number of positions before the inputs', which no shift moves
    texts: TokenTexts = None

    @property
    def several(self) -> bool:
        """Whether any example has more than one real position."""
        if self.length is None or self.real is None:
            return self.length != 1
        return int(self.real.sum(1).max()) > 1

    def last(self, scores: Tensor) -> Tensor:
        """Drop scores, (B, [R,] K), of what comes before these positions: virtual tokens or cached positions."""
        return scores if self.length is None else scores[..., max(0, scores.shape[-1] - self.length) :]

    def shift_left(self, value: Any) -> Any:
        """Shift an argument that has one entry per position as the examples were; return any other unchanged."""
        if self.shift is None or not isinstance(value, Tensor) or value.dim() < 2:
            return value
        return self._rolled(value, self.shift, 1) if value.shape[:2] == (len(self.shift), self.length) else value

    def after(self, count: int, real: Tensor | None = None) -> "Positions":
        """Return these positions after ``count`` others, all of them real unless ``real`` tells, (B, count)."""
        if count == 0 or self.length is None:
            return self
        both = None
        some = self.real if real is None else real
        if some is not None:
            masks = (real, count), (self.real, self.length)
            both = torch.cat([some.new_ones(len(some), size) if mask is None else mask for mask, size in masks], dim=1)
        return Positions(self.length + count, both, self.shift, self.before + count)

    def shift_back(self, rows: Tensor, axis: int) -> Tensor:
        """Shift results back to their positions in the user's inputs, along an axis of length S."""
        return rows if self.shift is None else self._rolled(rows, -self.shift, axis)

    def _rolled(self, tensor: Tensor, shift: Tensor, axis: int) -> Tensor:
        """Roll each example's entries along an axis to the left, but for those before the inputs'."""
        first = tensor.narrow(axis, 0, self.before)
        behind = rolled(tensor.narrow(axis, self.before, tensor.shape[axis] - self.before), shift, axis)
        return torch.cat([first, behind], dim=axis) if self.before else behind

    def restore(self, rows: Tensor, axis: int) -> Tensor:
        """Set results at padding to 0 and shift them back, along an axis of length S."""
        if self.real is not None:
            rows = rows.where(_along(axis, self.real, rows), 0)
        return self.shift_back(rows, axis)

    def cut(self, value: Any, batch: int, length: int) -> Any:
        """Crop an argument to the first example's first positions, a mask over queries and keys along both axes."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if self.length != batch and value.shape == (self.length, self.length):
            return value[:length, :length]
        if self.length != batch and value.shape[:2] == (self.length, batch):
            return value[:length, :1]
        if value.shape[0] != batch:
            return value
        sequence = self.length is not None and value.dim() >= 2 and value.shape[1] == self.length
        return value[:1, :length] if sequence else value[:1]


@dataclass(frozen=True)
class Prefix:
    """What comes before the inputs: cached positions, or an adapter's virtual tokens."""

    cache: Cache | None = None  # the user's, of which each forward pass gets a copy
    past: int = 0  # keys before the inputs' in self-attention, a decoder's if there is one: of a cache or tuned prefix
    past_real: Tensor | None = None  # True at the real ones of these, (B, past); None if all are
    virtual: int = 0  # virtual tokens, with queries and keys, before the inputs', an encoder's if there is one

    @property
    def cached(self) -> int:
        """Number of positions in the cache."""
        return 0 if self.cache is None else self.past

    @property
    def virtual_tokens(self) -> int:
        """Number of virtual tokens, those of a tuned prefix included."""
        return self.virtual + self.past - self.cached

    def texts(self, *, encoder: bool = False, decoder: bool = False) -> list[str]:
        """Return what stands for these positions' tokens in one stack of layers, or in one half of two."""
        virtual = self.virtual * (not decoder) + (self.past - self.cached) * (not encoder)
        kinds = {"virtual": virtual, "cached": self.cached * (not encoder)}
        return [f"[{kind} {place}]" for kind, count in kinds.items() for place in range(1, count + 1)]

    def passed(self, arguments: dict[str, Any], mask: str) -> dict[str, Any]:
        """Return a model's arguments with a copy of the cache, and with a mask over its positions, too."""
        if self.cache is None:
            return arguments
        passed, new = {**arguments, CACHE: copied(self.cache)}, arguments.get(mask)
        if isinstance(new, Tensor):
            old = new.new_ones(len(new), self.past) if self.past_real is None else self.past_real.to(new)
            passed[mask] = torch.cat([old, new], dim=1)
        return passed

    def of_examples(self, examples: Sequence[int]) -> "Prefix":
        """Return the same for some examples, which may repeat."""
        if self.cache is None:
            return self
        index = torch.tensor(examples, dtype=torch.long, device="cpu")
        real = None if self.past_real is None else self.past_real[index.to(self.past_real.device)]
        return replace(self, cache=selected(self.cache, index), past_real=real)


@dataclass(frozen=True)
class ModelCall:
    """One call of a model."""

    facts: Model
    arguments: dict[str, Any]  # of its forward function, by name
    batch: int
    positions: Positions  # of the inputs, the encoder's in an encoder–decoder model
    decoder: Positions  # of the decoder's inputs in an encoder–decoder model
    prefix: Prefix = field(default_factory=Prefix)
    last: int | None = None  # how many of the last positions have rows in the maps of the stacks ROWED; all if None
    # Positions of queries and keys of the towers' stacks, which the latest forward pass of this call showed.
    seen: dict[Role, tuple[Positions, Positions]] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.facts.module

    @property
    def encoder(self) -> nn.Module | None:
        """The encoder of an encoder–decoder model; None for any other model."""
        return self.facts.encoder

    @cached_property
    def pictures(self) -> Pictures:
        """Which positions are pictures, in the order of the user's inputs."""
        if not self.facts.towers and PIXELS not in self.arguments:
            return Pictures()
        arguments, real, ids = self.arguments, self.positions.real, self.arguments.get("input_ids")
        if isinstance(ids, Tensor):
            arguments = arguments | {"input_ids": self.positions.shift_back(ids, 1)}
            real = None if real is None else self.positions.shift_back(real, 1)
        return read_pictures(config_of(self.model), list(self.facts.towers), arguments, real)

    @property
    def library(self) -> Library:
        """The library that the model is built with."""
        return self.facts.library

    @property
    def unseen(self) -> str:
        """The message for a call in which no attention was seen."""
        if not self.facts.towers or "self" in self.facts.watched:
            return no_attention(self.model)
        return (
            f"no attention of {' or '.join(self.facts.watched)} was seen in {type(self.model).__name__}; pass its "
            "inputs, too"
        )

    def stacks(self) -> Stacks:
        """Create the checks of a forward pass's attention calls."""
        facts, prefix = self.facts, self.prefix
        several, grows = prefix.virtual > 0 or self.positions.several, prefix.cached > 0

        def see(role: Role, attention: AttentionCall) -> None:
            self.seen[role] = _tower_positions(attention)

        return Stacks(facts.role_of, towers=bool(facts.towers), several=several, see=see, past=prefix.past, grows=grows)

    @contextmanager
    def attention_through(self, function: AttentionFunction) -> Iterator[None]:
        """Put the model in ``eval()`` and tell ``function`` of its attention calls; undo both on exit."""
        with evaluating(self.model), ExitStack() as stack:
            if self.facts.towers:
                watched = [tower for name, tower in self.facts.towers.items() if name in self.facts.watched]
                function = self._watching(stack.enter_context(gathering_chunks(watched, function)))
            if self.prefix.past:
                function = self._over_all_keys(function)
            stack.enter_context(self.facts.attention_through(function))
            yield

    def _watching(self, function: AttentionFunction) -> AttentionFunction:
        role_of = self.facts.role_of
        return lambda call: function(call) if role_of(call) in self.facts.watched else call.output()

    def _over_all_keys(self, function: AttentionFunction) -> AttentionFunction:
        """Hand on self-attention over all past keys and the queries' own, however many a layer's cache holds."""
        role_of = self.facts.role_of

        def attend(call: AttentionCall) -> Tensor:
            extends = not call.cross and role_of(call) in EXTENDED
            return function(call.over_keys(self.prefix.past + call.query.shape[2]) if extends else call)

        return attend

    def positions_of(self, role: Role) -> tuple[Positions, Positions]:
        """Positions of a stack's queries that have rows, and of its keys."""
        if self.facts.towers and role != "self":
            queries, keys = self.seen.get(role, (Positions(), Positions()))
            queries = self.positions if role == "cross" else queries
        else:
            first = self.positions.after(self.prefix.virtual)
            queries = self.decoder if role in ("decoder", "cross") else first
            keys = first if role in ("encoder", "cross") else queries.after(self.prefix.past, self.prefix.past_real)
        return queries if self.last is None or role not in ROWED else Positions(self.last), keys

    def of_last(self, count: int) -> "ModelCall":
        """The same call, of which only the last positions have rows in the maps."""
        length = self.output_positions.length
        if length is None:
            raise InvalidInputError(f"got last={count} for inputs that are no sequence of tokens; leave it out")
        self.refuse_padding(f"last={count}")
        if count > length:
            raise InvalidInputError(f"got last={count}; the sequence has {length} positions")
        return replace(self, last=count)

    def refuse_padding(self, given: str) -> None:
        """Refuse what names positions if these differ between examples."""
        if self.output_positions.real is not None:
            raise InvalidInputError(
                f"got {given} and padding, with which positions differ between examples; pass examples without "
                "padding, one at a time if they differ in length"
            )

    @property
    def without_rows(self) -> int:
        """Number of keys without rows: cached ones, and those before the last if only these have rows."""
        length = self.output_positions.length
        return self.prefix.cached + (0 if self.last is None or length is None else length - self.last)

    def texts_of(self, role: Role) -> Sequence[Sequence[str]] | None:
        """Return the texts of the keys of a stack's self-attention, if those of their tokens are known."""
        if self.facts.decoder is None:
            before, tokens = self.prefix.texts(), self.positions.texts if role == "self" else None
        elif role == "encoder":
            before, tokens = self.prefix.texts(encoder=True), self.positions.texts
        else:
            before, tokens = self.prefix.texts(decoder=True), self.decoder.texts
        return tokens and [[*before, *texts] for texts in tokens]

    @property
    def passed(self) -> dict[str, Any]:
        """What the model is called with."""
        library = self.facts.library
        mask = library.mask if self.facts.decoder is None else library.decoder_mask
        return self.prefix.passed(self.arguments, str(mask))

    @property
    def output_positions(self) -> Positions:
        """Positions of the outputs: those of the decoder's inputs in an encoder–decoder model."""
        return self.positions if self.facts.decoder is None else self.decoder

    def run(self) -> Any:
        """Run the model; errors of its own code become :class:`~captum_norm.InvalidInputError`."""
        try:
            return self.model(**self.passed)
        except (CaptumNormError, torch.OutOfMemoryError):
            raise
        except (LookupError, ValueError, RuntimeError, TypeError, AttributeError, AssertionError) as error:
            if _is_ours(error):
                raise
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            name = type(self.model).__name__
            lacks_decoder = self.encoder is not None and not any(map(self.library.is_decoders, self.arguments))
            hint = f" ({self.library.without_decoder})" * lacks_decoder
            if "padding token" in reason:
                hint = " (copies of one example are a batch, too; set model.config.pad_token_id)"
            message = f"the forward pass of {name} does not accept these inputs: {reason}{hint}"
            if lacks_decoder and not isinstance(error, TypeError):  # which names what is missing
                message = f"got {name} without its decoder's inputs; {self.library.without_decoder}"
            raise InvalidInputError(message) from error

    def note(self, output: Any) -> None:
        """Show the output that is explained to whoever watches."""
        watch = WATCH.get()
        if watch is not None:
            watch(self, output)

    def with_few_outputs(self) -> "ModelCall":
        """The same call for the sake of the layers: with the logits of one position, or those watched, if it can."""
        given = self.arguments
        readers = [module for module in modules_of(self.model) if FEW in forward_parameters(module)]
        # Where a model inside reads it, too (Gemma 4), some layers run at that position alone.
        if readers != [self.model] or given.get(FEW) or given.get("labels") is not None:
            return self
        return replace(self, arguments=given | {FEW: 1 if WATCH.get() is None else self.last})

    def excerpt(self, length: int) -> "ModelCall":
        """The first ``length`` positions of the first example, without a cache."""
        arguments = self._map_arguments(lambda name, value: self._positions_for(name).cut(value, self.batch, length))
        positions, decoder = (
            replace(old, length=old.length and min(old.length, length), real=old.cut(old.real, self.batch, length))
            for old in (self.positions, self.decoder)
        )
        if self.prefix.cached:
            arguments.pop("cache_position", None)  # places behind those of the cache
        call = replace(self, arguments=arguments, batch=1, positions=positions, decoder=decoder, last=None)
        return replace(call, prefix=Prefix()) if self.prefix.cached else call

    def example(self, index: int) -> "ModelCall":
        """One example alone."""
        return self.map_batched(lambda value: value[index : index + 1], [index])

    def examples(self, index: Tensor, length: int) -> "ModelCall":
        """Some examples, (N,), cut to their first ``length`` positions, without shifts of results back."""

        def take(value: Tensor) -> Tensor:
            rows = value[index.to(value.device)]
            return rows[:, :length] if rows.dim() > 1 and rows.shape[1] == self.positions.length else rows

        call = self.map_batched(take, index.tolist())
        return replace(call, positions=replace(call.positions, length=length, shift=None), last=None)

    def repeated(self, copies: int) -> "ModelCall":
        """A call with ``copies`` of this call's only example."""

        def copied(value: Tensor) -> Tensor:
            expanded = value.expand(copies, *value.shape[1:])
            # Models view pictures, and ids such as the targets of a loss, in another shape.
            return expanded.contiguous() if self.facts.towers or value.dim() <= 2 else expanded

        return self.map_batched(copied, [0] * copies)

    def outside_inference(self) -> "ModelCall":
        """The call without inference tensors, which autograd cannot record."""

        def outside(value: Any) -> Any:
            return value.clone() if isinstance(value, Tensor) and value.is_inference() else value

        return replace(self, arguments=self._map_arguments(lambda _, value: outside(value)))

    def map_batched(self, change: Callable[[Tensor], Tensor], examples: Sequence[int]) -> "ModelCall":
        """Make a call of some examples, one of which may come several times."""
        sequences = () if self.library.sequences is None else (self.positions.length, self.decoder.length)

        def changed(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() == 0:
                return value
            if value.shape[0] == self.batch:
                return change(value)
            if value.dim() > 1 and value.shape[0] in sequences and value.shape[1] == self.batch:
                return change(value.transpose(0, 1)).transpose(0, 1).contiguous()
            # A mask for each head.
            if value.dim() == 3 and {*value.shape[1:]} <= {*sequences} and value.shape[0] % self.batch == 0:
                return change(value.unflatten(0, (self.batch, -1))).flatten(0, 1)
            return value

        counts = self.pictures.counts if self.facts.towers else {}
        if counts is None:
            raise InvalidInputError(
                f"it is unknown which pictures belong to which of the {self.batch} examples; pass one at a time"
            )
        arguments = self._map_arguments(
            lambda name, value: of_examples(value, counts[name], examples) if name in counts else changed(value)
        )
        positions, decoder = (
            replace(old, real=changed(old.real), shift=changed(old.shift)) for old in (self.positions, self.decoder)
        )
        prefix, batch = self.prefix.of_examples(examples), len(examples)
        return replace(self, arguments=arguments, batch=batch, positions=positions, decoder=decoder, prefix=prefix)

    def _map_arguments(self, change: Callable[[str, Any], Any]) -> dict[str, Any]:
        """Apply a function to every argument; a tensor with several names, such as query and key, stays one tensor."""
        once: dict[int, Any] = {}
        return {
            name: once.setdefault(id(value), _changed(change, name, value)) for name, value in self.arguments.items()
        }

    def _positions_for(self, name: str) -> Positions:
        return self.decoder if self.library.is_decoders(name) else self.positions


def rolled(tensor: Tensor, shift: Tensor, axis: int) -> Tensor:
    """Roll each example's entries along an axis to the left."""
    length = tensor.shape[axis]
    source = (torch.arange(length, device=shift.device) + shift[:, None]) % length
    return tensor.gather(axis, _along(axis, source, tensor).expand_as(tensor))


def _along(axis: int, values: Tensor, tensor: Tensor) -> Tensor:
    """Reshape values (B, S) to broadcast against the batch and an axis of a tensor, on its device."""
    shape = [1] * tensor.dim()
    shape[0], shape[axis] = values.shape
    return values.to(tensor.device).reshape(shape)


def _tower_positions(call: AttentionCall) -> tuple[Positions, Positions]:
    """Positions of a tower's queries and keys: those are real that a query attends to or, without a mask, all."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    attended = torch.ones(len(call.query), keys, dtype=torch.bool, device=call.key.device)
    mask = call.whole().mask
    if mask is not None and mask.dim() == 4:
        attended = (mask > torch.finfo(mask.dtype).min / 2)[..., :keys].any(1).any(1).expand_as(attended)
    asking = attended if not call.cross else attended.new_ones(len(call.query), queries)
    return Positions(queries, asking), Positions(keys, attended)


def _changed(change: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    """Change an argument, or the tensors of an encoder that has run."""
    if isinstance(value, Mapping) and name == "encoder_outputs":
        # A ModelOutput, whose entries are its attributes, too.
        return type(value)(**{key: _changed(change, name, entry) for key, entry in value.items()})
    if isinstance(value, tuple | list) and name == "encoder_outputs":
        return type(value)(_changed(change, name, entry) for entry in value)
    return change(name, value)


def _is_ours(error: Exception) -> bool:
    """Whether our own hooks raised an error, not the model's code."""
    # Our function mode is around every torch function that the model calls.
    *_, frame = (frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name != "__torch_function__")
    return str(frame.f_globals.get("__name__")).startswith("captum_norm.")
