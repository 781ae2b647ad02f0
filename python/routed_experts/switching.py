"""How one experts module is read, checked and put on a backend, by what kind of module it is.

``SWITCHES`` lists the kinds; the first that accepts a module owns it. Modules that were built on this package
hold an attribute. Modules that transformers dispatches hold a name in their config, while this package is
registered there. Any other module gets a forward of its own on the instance.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from routed_experts.config_switch import ConfigSwitch
from routed_experts.decorator import chosen_backend
from routed_experts.errors import UnsupportedExperts
from routed_experts.forward_switch import ForwardSwitch
from routed_experts.modules import RoutedExperts
from routed_experts.names import library_name
from routed_experts.switch_protocol import ExpertsModule, Switch, check_weights


class AttributeSwitch:
    """RoutedExperts and decorated classes: their forward reads ``experts_implementation``."""

    def accepts(self, module: nn.Module) -> bool:
        """Accept what was built on this package."""
        return isinstance(module, RoutedExperts) or hasattr(type(module), "forward_reference")

    def read(self, module: nn.Module) -> str:
        """Return the name that the forward would look up."""
        return chosen_backend(module)

    def check(self, experts: ExpertsModule, name: str) -> None:
        """Refuse library functions: such a module has none."""
        if library_name(name) is not None:
            raise UnsupportedExperts(
                f"{experts.path or 'the module'} has no function of its library's",
                found=f"{type(experts.module).__name__}, which runs on this package",
                needed="a backend name of this package",
                hint="'eager' is the plain reference",
            )
        check_weights(experts)

    def write(self, module: nn.Module, name: str) -> None:
        """Set the attribute."""
        module.experts_implementation = name  # type: ignore[assignment]

    def keep(self, module: nn.Module) -> Callable[[], None]:
        """Write the present name again."""
        name = self.read(module)
        return lambda: self.write(module, name)


SWITCHES: list[Switch] = [AttributeSwitch(), ConfigSwitch(), ForwardSwitch()]


def switch_of(module: nn.Module) -> Switch:
    """Return the way in which ``module`` holds its choice."""
    return next(switch for switch in SWITCHES if switch.accepts(module))
