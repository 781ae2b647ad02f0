"""Backends that are a choice for loading: the model's own methods neither switch in or out of one, nor save after one.

The library's guard knows one name of its own at the top level. Ours looks at every config that the method changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from routed_experts.config_names import ATTRIBUTE, keep_config
from routed_experts.errors import SwitchError
from routed_experts.names import from_config, is_load_time_only
from routed_experts.reshaped import check_unshaped
from routed_experts.transformers_integration.adapter import Patch, PatchAdapter


class LoadTimeAdapter(PatchAdapter):
    """The model's methods for switching and for saving."""

    name = "load-time choices"

    def make_patches(self) -> None:
        """Wrap those that the release has."""
        from transformers import PreTrainedModel

        for method, make in (("set_experts_implementation", _checked), ("save_pretrained", _unshaped)):
            if hasattr(PreTrainedModel, method):
                self.patches.append(Patch(PreTrainedModel, method, make))


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_experts_implementation(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = [(config, config._experts_implementation, keep_config(config)) for config in _configs(self)]
        result = original(self, *args, **kwargs)
        moves = [(from_config(old), from_config(config._experts_implementation)) for config, old, _ in before]
        for old, new in moves:
            if old != new and (is_load_time_only(old) or is_load_time_only(new)):
                for _, _, restore in before:
                    restore()
                raise SwitchError(
                    f"{type(self).__name__} cannot go from {old!r} to {new!r} after loading",
                    found=f"{old!r} in use",
                    needed="a backend that leaves the weights as they are, before and after",
                    hint="choose it when the model is loaded: from_pretrained(..., experts_implementation=...)",
                )
        return result

    return set_experts_implementation


def _unshaped(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_unshaped(self.parameters())
        return original(self, *args, **kwargs)

    return save_pretrained


def _configs(model: Any) -> Iterator[Any]:
    """Every config of a model that holds a choice, once."""
    owners = [model, *model.modules()]
    waiting = [config for owner in owners if (config := getattr(owner, "config", None)) is not None]
    seen: set[int] = set()
    while waiting:
        config = waiting.pop()
        if id(config) in seen or not hasattr(config, ATTRIBUTE):
            continue
        seen.add(id(config))
        yield config
        keys = getattr(config, "sub_configs", None) or {}
        waiting += [sub for key in keys if (sub := getattr(config, key, None)) is not None]
