"""Finds out what a pickle refers to from its opcodes alone, without building or calling anything.

A pickle can refer to an object many times, so a few hundred bytes can expand to more values than fit into memory or
time. Two such cases are checked here: tuples inside tuples, which are traversed when hashed, and the declared sizes of
storages.
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
        value: the object, if it is a number, a string or a tuple of these; otherwise None.
        parts: how many objects hashing it traverses.
    """

    value: Any = None
    parts: int = 1


_MARK = _Item("the mark")


@dataclass
class PickleScan:
    """The names that pickles refer to, and the memory that they declare.

    Attributes:
        names: the classes and functions, ``module.name``.
        storages: the number of elements of each storage, by key.
    """

    names: set[str] = field(default_factory=set)
    storages: dict[str, int] = field(default_factory=dict)

    def read(self, stream: BinaryIO) -> None:
        """Add the names and storages of the next pickle of a stream.

        Raises:
            InvalidInputError: a tuple has more than 100,000 objects, shared ones counted each time.
            ValueError: the pickle is incomplete.
            LookupError: it uses an object that does not exist.
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
        """Record the storage ``("storage", type, key, location, elements, …)``; torch refuses anything else."""
        match identity:
            case (_, _, str() | bytes() as key, _, int() as elements, *_):
                self.storages[str(key)] = max(elements, self.storages.get(str(key), 0))


def _current_name(argument: str) -> str:
    """The Python 3 name for a Python 2 name, as in pickles of protocol 2: ``builtins.int`` for ``__builtin__ long``."""
    module, name = argument.split(" ")
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    return f"{module}.{name}"


def _tuple(items: list[_Item]) -> _Item:
    parts = 1 + sum(item.parts for item in items)
    if parts > _MOST_PARTS:
        raise InvalidInputError(f"a tuple has more than {_MOST_PARTS} objects")
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
    """Apply any other opcode to the stack, as described by ``pickletools``."""
    taken = [kind.name for kind in opcode.stack_before]
    if "mark" in taken:
        _popped_to_mark(stack)
        taken = taken[: taken.index("mark")]
    _popped(stack, len(taken))
    stack.extend(_Item(None if taken else argument) for _ in opcode.stack_after)
