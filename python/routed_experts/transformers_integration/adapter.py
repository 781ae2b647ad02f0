"""What every adapter is, and how an attribute of a transformers class is replaced and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Plan:
    """What shall be registered: backends by their bare names, ``auto`` among them, and whether ours replace theirs."""

    names: tuple[str, ...]
    replace: bool


class Adapter(Protocol):
    """One hook into transformers, found out by what the installed release does."""

    name: str

    def install(self, plan: Plan) -> None:
        """Bring the hook to the state of ``plan``, from no state or any earlier one; raise if it cannot be."""

    def uninstall(self) -> None:
        """Put everything back; after a failed ``install`` too."""


class Patch:
    """A class attribute that holds a wrapper of what was there.

    Should somebody have wrapped the wrapper meanwhile, undoing leaves it in their chain, where it passes on.
    """

    def __init__(self, owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace function or property setter ``owner.name`` by ``make`` of it."""
        self.owner, self.name, self.inherited = owner, name, name not in vars(owner)
        self.original = getattr(owner, name)
        self.active = True
        if isinstance(self.original, property):
            setter = self._passing(self.original.fset, make)  # type: ignore[arg-type]
            self.wrapper: Any = property(self.original.fget, setter, self.original.fdel, self.original.__doc__)
        else:
            self.wrapper = self._passing(self.original, make)
        setattr(owner, name, self.wrapper)

    def _passing(
        self, original: Callable[..., Any], make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> Callable[..., Any]:
        replacement = make(original)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return (replacement if self.active else original)(*args, **kwargs)

        return wrapper

    def undo(self) -> None:
        """Put the original back."""
        self.active = False
        if vars(self.owner).get(self.name) is not self.wrapper:
            return
        if self.inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


class PatchAdapter:
    """An adapter that consists of patches, in place or not."""

    name = ""

    def __init__(self) -> None:
        self.patches: list[Patch] = []

    def make_patches(self) -> None:
        """Append to ``self.patches`` as each is put in place; raise if the release lacks what they need."""
        raise NotImplementedError

    def install(self, plan: Plan) -> None:
        """Put the patches in place once."""
        if not self.patches:
            self.make_patches()

    def uninstall(self) -> None:
        """Undo the patches, last first."""
        while self.patches:
            self.patches.pop().undo()
