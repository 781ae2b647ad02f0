"""Symbols that go through a gate in place of tensors, and so find out its expression."""

from __future__ import annotations

from typing import Any


def is_number(value: Any) -> bool:
    """Whether it is a plain and finite one."""
    return (type(value) is float or type(value) is int) and abs(value) < float("inf")


class Attributes:
    """Stands for a module: every attribute is a symbol, and ``read`` has the names of those that were asked for.

    Those in ``absent`` are None.
    """

    def __init__(self, absent: tuple[str, ...] = ()) -> None:
        self.read: dict[str, None] = {}
        self.absent = absent

    def __getattr__(self, name: str) -> Symbol | None:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self.absent:
            return None
        self.read[name] = None
        return attribute(name)


def attribute(name: str) -> Symbol:
    """Return the symbol of a module's attribute."""
    return Symbol("attribute", name)


class Symbol:
    """A tensor, number or function of unknown value. ``tree`` is how it came about, one tree for equal results.

    It knows the operations that gates consist of; all others, and every question about its value, are errors.
    """

    __slots__ = ("tree",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, *tree: Any) -> None:
        self.tree = tree

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Symbol, Symbol]:
        """Return the halves of the last dimension; no other chunks are known."""
        if (chunks, dim) != (2, -1):
            raise TypeError("not the halves of the last dimension")
        return Symbol("half", self.tree, 0), Symbol("half", self.tree, 1)

    def __getitem__(self, index: Any) -> Symbol:
        dots, columns = index
        if dots is not Ellipsis or columns.stop is not None or columns.step != 2:
            raise TypeError("not every second column")
        return Symbol("columns", self.tree, columns.start or 0)

    def clamp(self, min: Any = None, max: Any = None) -> Symbol:
        """Clamp by symbols, numbers or None."""
        return Symbol("clamp", self.tree, _tree(min), _tree(max))

    def __neg__(self) -> Symbol:
        return Symbol("negative", self.tree)

    def __add__(self, other: Any) -> Symbol:
        return Symbol("sum", *sorted((self.tree, _tree(other)), key=repr))

    def __mul__(self, other: Any) -> Symbol:
        return Symbol("product", *sorted((self.tree, _tree(other)), key=repr))

    __radd__, __rmul__ = __add__, __mul__

    def __call__(self, argument: Symbol) -> Symbol:
        """Call an activation on a tensor."""
        return Symbol("call", self.tree, argument.tree)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Symbol:
        (argument,) = args
        if any((kwargs or {}).values()):  # an argument such as inplace=True
            raise TypeError("more than a function of one tensor")
        return Symbol("call", function, argument.tree)

    def __bool__(self) -> bool:
        raise TypeError("a symbol has no value")

    def __eq__(self, other: object) -> bool:
        raise TypeError("a symbol has no value")


def _tree(value: Any) -> Any:
    if value is None or isinstance(value, Symbol):
        return None if value is None else value.tree
    if not is_number(value):
        raise TypeError("neither a symbol nor a number")
    return ("number", float(value))
