"""Our functions in transformers' registries: for floating-point experts, and for those it quantizes itself."""

from __future__ import annotations

from types import CodeType
from typing import Any

from torch import nn

from routed_experts.config_names import STATE
from routed_experts.names import to_config
from routed_experts.transformers_integration.adapter import Plan
from routed_experts.transformers_integration.forwards import ExpertsForward, forward_for

# "eager" stays the model's own code in every case: it is what others are compared with.
REPLACEABLE = ("batched_mm", "grouped_mm")
_ABSENT: Any = object()


class Entries:
    """Entries of one registry class, for the whole process; remembers what each name held before."""

    def __init__(self) -> None:
        self.registry: Any = None
        self.before: dict[str, Any] = {}

    def bring_to(self, registry: Any, wanted: dict[str, ExpertsForward]) -> None:
        """Have exactly ``wanted`` of ours in the registry class."""
        self.registry = registry
        for name in [name for name in self.before if name not in wanted]:
            self._take_out(name)
        for name, function in wanted.items():
            if name not in self.before:
                self.before[name] = registry._global_mapping.get(name, _ABSENT)
                registry.register(name, function)

    def clear(self) -> None:
        """Put back what every name held before."""
        for name in list(self.before):
            self._take_out(name)

    def _take_out(self, name: str) -> None:
        before = self.before.pop(name)
        mapping = self.registry._global_mapping
        # Somebody else's later entry under the name is theirs.
        if getattr(mapping.get(name), "__module__", None) != forward_for.__module__:
            return
        if before is _ABSENT:
            del mapping[name]
        else:
            mapping[name] = before


class RegistrationAdapter:
    """Our names in the registry of experts functions; with ``replace``, ours behind names of the library's too."""

    name = "registration"

    def __init__(self) -> None:
        self.entries = Entries()

    def install(self, plan: Plan) -> None:
        """Register, see that a lookup finds it, and tell the switch which modules look there."""
        from transformers.integrations import moe

        wanted = {to_config(name): forward_for(name) for name in plan.names}
        replaced = REPLACEABLE if plan.replace else ()
        self.entries.bring_to(moe.ExpertsInterface, wanted | {name: forward_for(name) for name in replaced})
        functions = moe.ALL_EXPERTS_FUNCTIONS
        if any(functions[name] is not function for name, function in wanted.items()):
            raise RuntimeError("a registered function is not the one that is looked up")
        dispatchers = frozenset([_dispatching_code(moe.use_experts_implementation)])
        STATE.fill(functions, dispatchers, frozenset(replaced))

    def uninstall(self) -> None:
        """Take our entries out."""
        STATE.clear()
        self.entries.clear()


def _dispatching_code(decorate: Any) -> CodeType:
    """The code that every decorated forward shares, found by decorating a class."""

    class Probe(nn.Module):
        def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> None:
            """Stand for a family's forward."""

    code: CodeType = decorate(Probe).forward.__code__
    return code


class QuantizedRegistrationAdapter:
    """Our names in the registry of quantized experts, where there is one.

    Names are checked against both registries together; one that only the first held would be accepted for a
    quantized model and end in a KeyError. Built-in names stay theirs.
    """

    name = "registration for quantized experts"

    def __init__(self) -> None:
        self.entries = Entries()

    def install(self, plan: Plan) -> None:
        """Register; ours read from the module whether it is quantized, and refuse what they cannot run."""
        try:
            from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
        except ImportError:
            return
        self.entries.bring_to(FP8ExpertsInterface, {to_config(name): forward_for(name) for name in plan.names})

    def uninstall(self) -> None:
        """Take our entries out."""
        self.entries.clear()
