"""Operators whose arguments are records: dataclasses or NamedTuples of tensors and options.

A torch.library operator takes tensors, numbers and lists only. `Signature` derives the operator's flat schema from the
annotations of a Python function, and converts between the two forms by the names of the fields.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    Sequence[Tensor]: "Tensor[]",
    Sequence[int]: "int[]",
    Sequence[bool]: "bool[]",
    int: "int",
    float: "float",
    float | None: "float?",
    bool: "bool",
}
SYMBOLIC = "SymInt"
"""`Annotated[int, SYMBOLIC]` declares a size, which torch.compile may leave symbolic."""
WRITTEN = "Tensor(a!)"
"""`Annotated[Tensor, WRITTEN]` declares the one tensor that an operator writes to."""


class _Value:
    """An argument that the flat form takes as it is."""

    size = 1

    def __init__(self, schema_type: str) -> None:
        self.schema_type = schema_type

    def declare(self, name: str) -> list[str]:
        return [f"{self.schema_type} {name}"]

    def tensor_paths(self, path: str) -> list[str]:
        return [path] if self.schema_type.startswith("Tensor") else []

    def flatten(self, value: object) -> list[Any]:
        return [value]

    def restoring(self, flat: Iterator[str], records: list[type]) -> str:
        return next(flat)


class _Fields:
    """Named arguments: the fields of a record, or the parameters of a function."""

    def __init__(self, annotations: Mapping[str, Any]) -> None:
        self.kinds = tuple((name, _kind(annotation)) for name, annotation in annotations.items())
        declared = [(name, kind, kind.declare(name)) for name, kind in self.kinds]
        names = Counter(entry.split()[1] for _, _, entries in declared for entry in entries)
        self.schema = [
            entry.replace(" ", f" {name}_") if isinstance(kind, _Record) and names[entry.split()[1]] > 1 else entry
            for name, kind, entries in declared
            for entry in entries
        ]  # two records of one type are told apart by the names of their arguments
        self.size = len(self.schema)

    def flatten_all(self, values: Iterable[Any]) -> list[Any]:
        flat: list[Any] = []
        for (_, kind), value in zip(self.kinds, values, strict=True):
            flat.extend(kind.flatten(value))
        return flat


class _Record(_Fields):
    """An argument that is a record; its fields take its place in the flat form."""

    def __init__(self, record: type) -> None:
        hints = typing.get_type_hints(record, include_extras=True)
        super().__init__({name: hints[name] for name in field_names(record)})
        self.record = record

    def declare(self, name: str) -> list[str]:
        return self.schema

    def tensor_paths(self, path: str) -> list[str]:
        """The paths of the tensors as `operator.attrgetter` takes them."""
        return [
            tensor_path for name, kind in self.kinds for tensor_path in kind.tensor_paths(f"{path}.{name}".lstrip("."))
        ]

    def flatten(self, value: object) -> list[Any]:
        return self.flatten_all([getattr(value, name) for name, _ in self.kinds])

    def restoring(self, flat: Iterator[str], records: list[type]) -> str:
        """The expression that makes the record from the names of its flat values."""
        records.append(self.record)
        own = f"record_{len(records) - 1}"
        fields = [(name, kind.restoring(flat, records)) for name, kind in self.kinds]
        if issubclass(self.record, tuple):  # as a NamedTuple's own constructor, in 0.13 us instead of 0.22
            return f"new({own}, ({', '.join(value for _, value in fields)},))"
        return f"{own}({', '.join(f'{name}={value}' for name, value in fields)})"


def _as_list(tensors: Any) -> Any:
    return tensors


def _in_a_list(tensor: Any) -> Any:
    return (tensor,)


def field_names(record: Any) -> tuple[str, ...]:
    """Names of the fields of a dataclass or NamedTuple, in order; empty for any other type."""
    if dataclasses.is_dataclass(record):
        return tuple(field.name for field in dataclasses.fields(record))
    return tuple(getattr(record, "_fields", ()))


def _kind(annotation: Any) -> _Value | _Record:
    if typing.get_origin(annotation) is typing.Annotated:
        base, *notes = typing.get_args(annotation)
        declared = next((note for note in notes if note in (SYMBOLIC, WRITTEN)), None)
        return _kind(base) if declared is None else _Value(declared)
    return _Record(annotation) if field_names(annotation) else _Value(_SCHEMA_TYPES[annotation])


class Signature:
    """The arguments and results of a function, and their flat form.

    Args:
        function: annotated with tensors, numbers, lists and records. It returns a tensor, or a NamedTuple of tensors.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        hints = typing.get_type_hints(function, include_extras=True)
        self._arguments = _Fields({name: hints[name] for name in inspect.signature(function).parameters})
        returned = hints["return"]
        self._results = returned if field_names(returned) else None
        results = _Fields(typing.get_type_hints(returned)) if self._results else None
        types = [entry.split()[0] for entry in results.schema] if results else [_SCHEMA_TYPES[returned]]
        result = f"({', '.join(types)})" if results else types[0]
        self.schema = f"({', '.join(self._arguments.schema)}) -> {result}"

    def tensor_getters(self) -> list[tuple[int, Callable[[Any], Iterable[Any]]]]:
        """For each argument that holds tensors: its position, and a function that returns them, or None for some."""
        getters: list[tuple[int, Callable[[Any], Iterable[Any]]]] = []
        for position, (_, kind) in enumerate(self._arguments.kinds):
            paths = kind.tensor_paths("")
            if isinstance(kind, _Record):
                if paths:
                    getters.append((position, operator.attrgetter(*paths, paths[0])))  # two or more return a tuple
            elif paths:
                getters.append((position, _as_list if kind.schema_type == "Tensor[]" else _in_a_list))
        return getters

    def flatten(self, args: Sequence[Any]) -> list[Any]:
        """The operator's flat arguments."""
        return self._arguments.flatten_all(args)

    def leading_tensors(self) -> int | None:
        """How many arguments there are up to the last tensor; None if a record or a list has tensors."""
        positions = [position for position, _ in self.tensor_getters()]
        if any(not isinstance(kind, _Value) or kind.schema_type == "Tensor[]" for kind in self._at(positions)):
            return None
        return positions[-1] + 1

    def _at(self, positions: Iterable[int]) -> list[_Value | _Record]:
        return [self._arguments.kinds[position][1] for position in positions]

    def flat(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """`body` with the operator's flat arguments.

        Compiled models call it with every operator, so it is generated code that names every value, not a loop.
        """
        names = [f"a{i}" for i in range(self._arguments.size)]
        left, records = iter(names), list[type]()
        values = [kind.restoring(left, records) for _, kind in self._arguments.kinds]
        scope: dict[str, Any] = {"body": body, "new": tuple.__new__}
        scope |= {f"record_{i}": record for i, record in enumerate(records)}
        return eval(f"lambda {', '.join(names)}: body({', '.join(values)})", scope)  # type: ignore[no-any-return]

    def results(self, flat: Any) -> Any:
        """The function's NamedTuple, of the operator's results."""
        return flat if self._results is None else self._results(*flat)
