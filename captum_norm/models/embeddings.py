"""Finds a model's token embeddings, replaces them for one call, and chooses replacements for tokens."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from captum_norm.checks import quoted
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import hooked
from captum_norm.models.model import library_of
from captum_norm.models.offloading import loaded
from captum_norm.models.wrappers import config_of

StandIn = Literal["mask", "pad", "zero", "mean"]
"""What replaces a token: the mask or padding token, zeros, or the mean of all tokens' embeddings."""

EMBEDDINGS = "inputs_embeds"
# Whether a model embeds tokens as (S, B, D), as XLNet does; which of two equal axes is which shows in another call.
_positions_first: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_ROWS = 4096  # of an embedding table that are averaged at a time


@dataclass(frozen=True, eq=False)
class Replacement:
    """What replaces a token.

    Attributes:
        name: ``mask:103``, ``pad:0``, ``id:7``, ``zero``, ``mean`` or ``given``.
        module: embeds the model's tokens.
        token: the token that is the replacement; None if none is.
        given: the embedding, (D,), if it was given.
    """

    name: str
    module: nn.Module
    token: int | None = None
    given: Tensor | None = None

    @property
    def vector(self) -> Tensor:
        """Its embedding with the model's present parameters, (D,)."""
        with torch.no_grad():
            if self.given is not None:
                return self.given
            if self.name == "mean":
                return _mean(self.module)
            embedding = _embedding(self.module, self.token or 0)
            return torch.zeros_like(embedding) if self.token is None else embedding


def embedding_module(model: nn.Module) -> nn.Module:
    """Return the module that looks up the tokens' embeddings of a model that reads one sequence."""
    library = library_of(model)
    if library.halves(model) is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder–decoder model; expected a model that reads one sequence"
        )
    module = library.embeddings(model)
    if module is None:
        # The order of the axes of torch.nn's models is known in attention alone.
        give = "give its class a method get_input_embeddings() that returns it"
        way = give if library.sequences is None else "take DecompX, AttnLRP or another method of captum_norm"
        raise UnsupportedModelError(f"{type(model).__name__} has no known module that embeds its tokens; {way}")
    return module


@contextmanager
def embeddings_through(model: nn.Module, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Apply ``function`` to the embeddings, (B, S, D), that one forward pass in this thread looks up while open."""
    calls = 0

    def hook(_: nn.Module, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return function(output)

    module = embedding_module(model)
    # T5 names one module and runs another that has the same table; an adapted table has the original one inside.
    inside = set(module.modules())
    others = (other for other in model.modules() if isinstance(other, nn.Embedding) and other not in inside)
    same = (other for other in others if other.weight is module.weight)
    with hooked((table, "result", hook) for table in (module, *same)):
        yield
    if calls != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} looked up embeddings in {type(module).__name__} {calls} times in one forward "
            "pass; expected once"
        )


def run_with_embeddings(call: ModelCall, function: Callable[[Tensor], Tensor]) -> Any:
    """Run a model with its tokens' embeddings, given or looked up, (B, S, D), replaced by ``function`` of them."""
    given = call.arguments.get(EMBEDDINGS)
    if given is not None:
        return replace(call, arguments=call.arguments | {EMBEDDINGS: function(given)}).run()
    model, batch, length = call.model, call.batch, call.positions.length
    if batch == length and batch > 1 and model not in _positions_first:
        run_embedded(call.example(0))

    def changed(embeddings: Tensor) -> Tensor:
        if batch != length:
            _positions_first[model] = embeddings.shape[:2] == (length, batch)
        if _positions_first.get(model):
            return function(embeddings.transpose(0, 1)).transpose(0, 1)
        return function(embeddings)

    with embeddings_through(model, changed):
        return call.run()


def run_embedded(call: ModelCall) -> tuple[Any, Tensor]:
    """Run a model; return its output and its tokens' embeddings, (B, S, D)."""
    seen: list[Tensor] = []

    def keep(embeddings: Tensor) -> Tensor:
        seen.append(embeddings)
        return embeddings

    output = run_with_embeddings(call, keep)
    return output, seen[0].detach()


def ordinary_positions(call: ModelCall, real: Tensor, special_ids: Collection[int]) -> Tensor:
    """Return True where a call's tokens are real, (B, S), and not special."""
    if not special_ids:
        return real
    ids = call.arguments.get("input_ids")
    if not isinstance(ids, Tensor):
        raise InvalidInputError("got embeddings and keep_special=True; expected token ids")
    return real & ~torch.isin(ids, torch.tensor(tuple(special_ids), device=ids.device))


def replacement(model: nn.Module, chosen: StandIn | int | Tensor | None, tokenizer: Any) -> Replacement:
    """Return what replaces a token of a model: a kind, the id of a token, or an embedding (D,).

    None stands for the mask token if there is one, else the padding token, else the mean. Their ids are those of
    the tokenizer, or of the model's configuration.
    """
    module = embedding_module(model)
    known = config_of(model) if tokenizer is None else tokenizer
    ids: dict[Any, int | None] = {kind: getattr(known, f"{kind}_token_id", None) for kind in ("mask", "pad")}
    if chosen is None:
        chosen = "mask" if ids["mask"] is not None else "pad" if ids["pad"] is not None else "mean"
    if isinstance(chosen, Tensor):
        width = len(_embedding(module, 0))
        if chosen.shape != (width,) or not chosen.is_floating_point():
            raise InvalidInputError(
                f"got a replacement of shape {tuple(chosen.shape)} and {chosen.dtype}; expected an embedding ({width},)"
            )
        return Replacement("given", module, given=chosen.detach().clone())
    if isinstance(chosen, int) and not isinstance(chosen, bool):
        return _of_token(f"id:{chosen}", module, chosen)
    if not isinstance(chosen, str) or chosen not in get_args(StandIn):
        expected = f"{', '.join(get_args(StandIn))}, the id of a token or an embedding"
        raise InvalidInputError(f"got the replacement {quoted(chosen)}; expected {expected}")
    if chosen in ("mean", "zero"):
        return Replacement(chosen, module)
    token = ids[chosen]
    if token is None:
        raise InvalidInputError(
            f"no {chosen} token is known for {type(model).__name__}; pass the tokenizer that has one, the id of "
            'another token, "mean" or "zero"'
        )
    return _of_token(f"{chosen}:{token}", module, token)


def _of_token(name: str, module: nn.Module, token: int) -> Replacement:
    if not 0 <= token < _size(module):
        raise InvalidInputError(f"got the token id {token}; the model knows the ids 0 to {_size(module) - 1}")
    return Replacement(name, module, token)


def _size(module: nn.Module) -> int:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise UnsupportedModelError(f"{type(module).__name__}, which embeds the tokens, has no table of embeddings")
    return len(weight)


def _embedding(module: nn.Module, token: int) -> Tensor:
    """Return a token's embedding, (D,), as the module computes it: Gemma, for example, scales the row of its table."""
    return _embedded(module, [torch.tensor([token], device="cpu")])[0][0]


def _embedded(module: nn.Module, ids: Sequence[Tensor]) -> list[Tensor]:
    """Return the embeddings of several pieces of token ids, (N, D) each, as the module computes them alone."""
    with ExitStack() as stack:
        for part in module.modules():
            stack.enter_context(loaded(part))
        device: Any = module.weight.device
        return [module(piece[None].to(device))[0] for piece in ids]


def _mean(module: nn.Module) -> Tensor:
    ids = torch.arange(_size(module), device="cpu")
    parts = _embedded(module, ids.split(_ROWS))
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    total = torch.stack([part.sum(0, dtype=dtype) for part in parts]).sum(0)
    return total.div(len(ids)).to(parts[0].dtype)
