"""Plugging into transformers 5: our backends under its ``experts_implementation`` names.

    rx.register_with_transformers()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="routed_experts")
    model.set_experts_implementation("routed_experts_grouped_mm")

Each hook is an adapter in a file of its own and is tried by what the installed release does, never by its
version; one that fails is left out with a warning that names it. ``plugin.py`` holds them together. Importing this
does not import transformers.
"""

from routed_experts.transformers_integration.forwards import forward_for
from routed_experts.transformers_integration.plugin import register_with_transformers, unregister_from_transformers

__all__ = ["forward_for", "register_with_transformers", "unregister_from_transformers"]
