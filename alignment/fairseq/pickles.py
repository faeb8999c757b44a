"""Finds out what a pickle would make from its opcodes alone: nothing is made, called or given memory.

A pickle can name one object many times, so a few hundred bytes can stand for more values than there is memory or time
for. Where that can hurt is bounded here: the tuples inside a tuple, which are walked one by one when it becomes a key,
and the sizes that are declared of storages.
"""

import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

from captum_norm import InvalidInputError

_MOST_PARTS = 100_000


class _Item(NamedTuple):
    """An object on the stack.

    Attributes:
        value: of a number, a text or a tuple of such, itself; None of anything else.
        parts: how many objects a hash of it walks.
    """

    value: Any = None
    parts: int = 1


_MARK = _Item("the mark")


@dataclass
class PickleScan:
    """What pickles refer to, and how much memory they declare.

    Attributes:
        names: the classes and functions, ``module.name``.
        storages: how many elements each storage has, by its key.
    """

    names: set[str] = field(default_factory=set)
    storages: dict[str, int] = field(default_factory=dict)

    def read(self, stream: BinaryIO) -> None:
        """Add what the next pickle of a stream refers to and declares.

        Raises:
            InvalidInputError: a tuple holds more than 100,000 objects, shared ones counted each time.
            ValueError: there is no whole pickle.
            LookupError: it takes what is not there.
        """
        stack, memo = list[_Item](), dict[Any, _Item]()
        for opcode, argument, _ in pickletools.genops(stream):
            match opcode.name:
                case "GLOBAL":
                    self.names.add(_current_name(str(argument)))
                    stack.append(_Item())
                case "MARK":
                    stack.append(_MARK)
                case "TUPLE":
                    stack.append(_tuple(_popped_to_mark(stack)))
                case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                    stack.append(_tuple(_popped(stack, len(opcode.stack_before))))
                case "PUT" | "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "GET" | "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "BINPERSID":
                    self._declare(stack.pop().value)
                    stack.append(_Item())
                case _:
                    _step(stack, opcode, argument)

    def _declare(self, identity: Any) -> None:
        """Notes the storage ``("storage", type, key, location, elements, …)``; torch refuses anything else."""
        match identity:
            case (_, _, str() | bytes() as key, _, int() as elements, *_):
                self.storages[str(key)] = max(elements, self.storages.get(str(key), 0))


def _current_name(argument: str) -> str:
    """The name in Python 3 of what a pickle of protocol 2 names as in Python 2: ``__builtin__ long`` is an ``int``."""
    module, name = argument.split(" ")
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    return f"{module}.{name}"


def _tuple(items: list[_Item]) -> _Item:
    parts = 1 + sum(item.parts for item in items)
    if parts > _MOST_PARTS:
        raise InvalidInputError(f"a tuple holds more than {_MOST_PARTS} objects")
    return _Item(tuple(item.value for item in items), parts)


def _popped(stack: list[_Item], count: int) -> list[_Item]:
    start = len(stack) - count
    if start < 0:
        raise LookupError("the stack has fewer objects")
    items = stack[start:]
    del stack[start:]
    return items


def _popped_to_mark(stack: list[_Item]) -> list[_Item]:
    items = list[_Item]()
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _step(stack: list[_Item], opcode: pickletools.OpcodeInfo, argument: Any) -> None:
    """What every other opcode does to the stack, as ``pickletools`` describes it."""
    taken = [kind.name for kind in opcode.stack_before]
    if "mark" in taken:
        _popped_to_mark(stack)
        taken = taken[: taken.index("mark")]
    _popped(stack, len(taken))
    stack.extend(_Item(None if taken else argument) for _ in opcode.stack_after)
