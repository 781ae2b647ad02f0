"""Releases whose list of valid names is fixed: let ours through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from routed_experts import config_names
from routed_experts.names import PREFIX, is_ours
from routed_experts.transformers_integration.adapter import Patch, PatchAdapter


class ValidationAdapter(PatchAdapter):
    """Where a registered name is refused, a check that knows ours and asks the original about all others."""

    name = "name validation"

    def make_patches(self) -> None:
        """Try a name; patch only if it is refused."""
        from transformers import PreTrainedModel

        try:
            # The check of a name that is no built-in one asks nothing of the model.
            PreTrainedModel.get_correct_experts_implementation(None, PREFIX)
        except ValueError:
            self.patches.append(Patch(PreTrainedModel, "get_correct_experts_implementation", _accept_ours))


def _accept_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_correct_experts_implementation(self: Any, requested_experts: str | None) -> Any:
        if is_ours(requested_experts) and requested_experts in config_names.STATE.functions:
            return requested_experts
        return original(self, requested_experts)

    return get_correct_experts_implementation
