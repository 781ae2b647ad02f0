"""Every error this package raises on purpose, one class a kind of mistake.

Each carries what was ``found``, what is ``needed`` and a ``hint`` on what to do next, as attributes and in
its text. The Rust core raises the same classes: its binding imports them from here.
"""

from __future__ import annotations

from typing import Any


class RoutedExpertsError(Exception):
    """Base of every error below; ``str(error)`` is the message followed by found, needed and hint."""

    def __init__(
        self, message: str, *, found: str | None = None, needed: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.found = found
        self.needed = needed
        self.hint = hint

    def __str__(self) -> str:
        parts = [self.message]
        parts += [
            f"{label}: {text}"
            for label, text in (("found", self.found), ("needed", self.needed), ("hint", self.hint))
            if text
        ]
        return "\n  ".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process boundaries (data loaders, ranks); keyword arguments need help there.
        details = {"found": self.found, "needed": self.needed, "hint": self.hint}
        return _rebuild, (type(self), self.message, details)


def _rebuild(cls: type[RoutedExpertsError], message: str, details: dict[str, str | None]) -> RoutedExpertsError:
    return cls(message, **details)


class BackendUnavailable(RoutedExpertsError, ImportError):
    """The machine lacks what a backend needs: a package, a device, an architecture, a toolkit."""


class UnsupportedExperts(RoutedExpertsError, ValueError):
    """A backend cannot run experts of this shape: layout flag, gate, bias, norm or dtype."""


class UnsupportedScheme(RoutedExpertsError, NotImplementedError):
    """A quantization scheme that a backend (or this version) does not run."""


class UnsupportedScales(RoutedExpertsError, ValueError, NotImplementedError):
    """Quantization scales of a format that the hardware path of a backend cannot use."""


class GradientUnsupported(RoutedExpertsError, NotImplementedError):
    """A gradient was asked of a backend or a tensor that has none."""


class UnknownBackend(RoutedExpertsError, KeyError, ValueError):
    """A backend name that is not registered."""


class LayoutError(RoutedExpertsError, ValueError):
    """Shapes or layout flags that contradict each other or the contract."""


class DtypeError(RoutedExpertsError, TypeError):
    """A dtype where another one is needed."""


class ExpertIndexError(RoutedExpertsError, IndexError, ValueError):
    """An expert id outside 0..E-1 (checked mode, expert parallelism off)."""


class CheckpointError(RoutedExpertsError, ValueError):
    """A checkpoint that is missing, corrupt, incomplete or not of a known layout."""


class SwitchError(RoutedExpertsError, RuntimeError):
    """A backend switch that is not possible after loading."""


class DeviceError(RoutedExpertsError, RuntimeError):
    """Tensors on devices that do not go together, no such device, or a launch that the CUDA driver refuses."""
