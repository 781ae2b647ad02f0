"""The parts of a model that choose a backend on their own: its top level, and each of its sub-configs.

Experts modules are found by what they carry, never by class or source text, and belong to the sub-config
whose config object they (or the nearest module around them) hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from routed_experts.config_names import (
    STATE,
    check_library_function,
    holds_choice,
    keep_config,
    read_config,
    write_config,
)
from routed_experts.errors import DtypeError, SwitchError
from routed_experts.module_weights import follows_protocol
from routed_experts.names import from_config, is_ours, library_name
from routed_experts.switch_protocol import ExpertsModule
from routed_experts.switching import switch_of

_REMEMBERED = "_routed_experts_parts"


@dataclass
class Part:
    """One key of the mapping: its config (None for a plain torch model) and the experts modules under it."""

    key: str
    config: Any
    modules: list[ExpertsModule] = field(default_factory=list)

    def runs_on_accelerator(self) -> bool:
        """Tell whether any of the experts' weights lies outside the CPU."""
        return any(weight_device(experts.module).type != "cpu" for experts in self.modules)


@dataclass(frozen=True)
class Parts:
    """A model's parts in the order of its config, top level ("") first."""

    root: nn.Module
    by_key: dict[str, Part]

    def experts(self) -> Iterator[ExpertsModule]:
        """Every experts module, part by part."""
        for part in self.by_key.values():
            yield from part.modules

    def current(self, key: str) -> str:
        """Return the name that a part runs on.

        A part without experts runs nothing; it reads as what was asked of it, so that a mapping round-trips.

        Raises:
            SwitchError: its modules were put on different backends one by one.
        """
        part = self.by_key[key]
        names = {switch_of(experts.module).read(experts.module): experts.path for experts in part.modules}
        if len(names) > 1:
            raise SwitchError(
                f"the experts of {key!r} run on different backends, which one name cannot say",
                found=", ".join(f"{path}: {name}" for name, path in names.items()),
                needed="one backend in each part",
                hint="get_experts_implementation of the single modules, or set one name for all first",
            )
        return next(iter(names), self.remembered(key))

    def remembered(self, key: str) -> str:
        """Return the name of a part without experts."""
        config, kept = self.by_key[key].config, self._kept
        stated = getattr(config, "_experts_implementation", None)
        if key in kept and not is_ours(stated):
            return kept[key]
        return read_config(config) if holds_choice(config) else from_config(stated)

    def check_statement(self, key: str, name: str) -> None:
        """Refuse a library's function that a part without experts could not name in its config."""
        part, library = self.by_key[key], library_name(name)
        if library is not None and not part.modules and holds_choice(part.config) and name != self.remembered(key):
            check_library_function(key, library, STATE.functions)

    def state(self, key: str, name: str) -> None:
        """Say what a part runs on where it is not said by its modules alone."""
        part = self.by_key[key]
        if not part.modules or holds_choice(part.config):
            self.remember(key, name)

    def remember(self, key: str, name: str) -> None:
        """Keep the name of a part where its model reads it, or else on the model object and nowhere in its config."""
        configs, kept = self._configs(key), self._kept
        for config in configs:
            write_config(config, name)
        if configs and key in kept:
            self._keep_on_model({other: old for other, old in kept.items() if other != key})
        elif not configs:
            self._keep_on_model({**kept, key: name})

    def keep(self, key: str) -> Callable[[], None]:
        """Return what undoes a later ``remember``."""
        undo, kept = [keep_config(config) for config in self._configs(key)], self._kept

        def restore() -> None:
            for put_back in undo:
                put_back()
            if self._kept != kept:
                self._keep_on_model(kept)

        return restore

    def _configs(self, key: str) -> list[Any]:
        """The configs in which the model's own methods look for a part's name; none for a plain model."""
        config = self.by_key[key].config
        if not holds_choice(config):
            return []
        return list(_nested(config)) if key else [config]

    @property
    def _kept(self) -> dict[str, str]:
        return self.root.__dict__.get(_REMEMBERED, {})

    def _keep_on_model(self, names: dict[str, str]) -> None:
        setattr(self.root, _REMEMBERED, names)


def parts_of(model: nn.Module) -> Parts:
    """Return the parts of any torch model, the experts modules sorted into them."""
    if not isinstance(model, nn.Module):
        raise DtypeError(
            "not a model",
            found=type(model).__name__,
            needed="an nn.Module",
            hint="pass the model, or its experts module",
        )
    root = _configured(model)
    config = getattr(root, "config", None)
    keys = getattr(config, "sub_configs", None) or {}
    parts = {"": Part("", config)}
    parts |= {key: Part(key, sub) for key in keys if (sub := getattr(config, key, None)) is not None}
    owners = {id(sub): key for key in parts if key for sub in _nested(parts[key].config)}
    for experts, around in _experts_in(root):
        held = (getattr(module, "config", None) for module in around)
        key = next((owners[id(c)] for c in held if id(c) in owners), "")
        parts[key].modules.append(experts)
    return Parts(root, parts)


def weight_device(module: nn.Module) -> torch.device:
    """Return the device of an experts module's weights."""
    with torch.no_grad():
        return module.down_proj.device  # type: ignore[return-value]


def _configured(model: nn.Module) -> nn.Module:
    """Look through wrappers of one module (data parallel, compiled) for the one with the config."""
    inner = model
    while getattr(inner, "config", None) is None and len(children := list(inner.children())) == 1:
        inner = children[0]
    return model if getattr(inner, "config", None) is None else inner


def _nested(config: Any) -> Iterator[Any]:
    """The config and, depth first, every sub-config of it."""
    yield config
    for key in getattr(config, "sub_configs", None) or {}:
        if (sub := getattr(config, key, None)) is not None:
            yield from _nested(sub)


def _experts_in(root: nn.Module) -> Iterator[tuple[ExpertsModule, list[nn.Module]]]:
    """Every experts module of ``root``, with itself and the modules around it, innermost first."""
    modules = dict(root.named_modules())
    found = [path for path, module in modules.items() if carries_experts(module)]
    for path in found:
        # Adapter wrappers pass attributes through and so look like the experts that they hold.
        if any(other != path and other.startswith(f"{path}." if path else "") for other in found):
            continue
        around = [modules[outer] for outer in _ancestors(path) if outer in modules]
        checks = (getattr(module, "get_correct_experts_implementation", None) for module in around)
        check = next((check for check in checks if check is not None), None)
        yield ExpertsModule(path, modules[path], check), around


def _ancestors(path: str) -> Iterator[str]:
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def carries_experts(module: nn.Module) -> bool:
    """Tell whether a module carries the protocol: a count, and 3-D weights up and down."""
    weights = (getattr(module, name, None) for name in ("gate_up_proj", "up_proj", "down_proj"))
    return follows_protocol(module) and all(weight is None or weight.ndim == 3 for weight in weights)
