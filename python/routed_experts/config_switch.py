"""Modules that transformers dispatches by their config: the choice is the config's, with our prefix.

The model's own ``set_experts_implementation`` and ours then speak of the same thing. As there, every model
and module that was built from one config object shares its setting.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from routed_experts.config_names import (
    check_library_function,
    functions_of,
    keep_config,
    read_config,
    write_config,
)
from routed_experts.forward_switch import held_backend, remove_forward
from routed_experts.names import PREFIX, library_name
from routed_experts.switch_protocol import ExpertsModule, check_weights


class ConfigSwitch:
    """Classes decorated by transformers, while our names are in the registry that their forward looks in."""

    def accepts(self, module: nn.Module) -> bool:
        """Accept a module whose forward would find our names."""
        return PREFIX in functions_of(module)

    def read(self, module: nn.Module) -> str:
        """Return what runs: a forward put on the instance before registration, else the config's name."""
        held = held_backend(module)
        return read_config(module.config) if held is None else held

    def check(self, experts: ExpertsModule, name: str) -> None:
        """Refuse weights that our backends do not know, and functions that the registry does not have."""
        library = library_name(name)
        if library is None:
            check_weights(experts)
        else:
            check_library_function(experts.path, library, functions_of(experts.module))

    def write(self, module: nn.Module, name: str) -> None:
        """Name it in the config; hooks around the forward stay."""
        remove_forward(module)
        write_config(module.config, name)

    def keep(self, module: nn.Module) -> Callable[[], None]:
        """Put the config's own value back; a forward on the instance is written again by name."""
        if (held := held_backend(module)) is not None:
            return lambda: self.write(module, held)
        return keep_config(module.config)
