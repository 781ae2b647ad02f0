"""The kernels by name, and the frozen bundle of entry points that each is used through."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from routed_experts.errors import BackendUnavailable, UnknownBackend

Entry: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class DeepGemm:
    """Grouped products of DeepGEMM; each writes into its third argument. ``alignment`` is that of an expert's rows."""

    bf16_nt: Entry
    bf16_nn: Entry
    fp8_fp4_nt: Entry
    fp8_fp4_nn: Entry
    fp8_fp4_plain: Entry
    cast_to_fp8: Entry
    lay_out_scales: Entry
    mk_alignment: Entry
    module: Any
    source: str


@dataclass(frozen=True)
class MegaMoe:
    """Experts and their exchange in one kernel of DeepGEMM's."""

    lay_out_scales: Entry
    cast_to_fp8: Entry
    symmetric_buffer: Entry
    transform_weights: Entry
    run: Entry
    module: Any
    source: str


@dataclass(frozen=True)
class SonicMoe:
    """SonicMoE's experts over any routing, with a backward of its own."""

    activation_type: Any
    run: Entry
    module: Any
    source: str


@dataclass(frozen=True)
class Kernel:
    """One kernel: its sources, and its entry points by the field of ``bundle`` that each fills.

    ``symbols`` are dotted paths, as the published build has them; some builds keep a symbol elsewhere, which
    ``also`` says. ``shares`` names the kernel whose module this one is found in. ``arguments`` are those, by field,
    that older builds of an entry point do not take.
    """

    name: str
    repository: str
    version: int | None
    revision: str | None
    package: str
    bundle: type
    symbols: Mapping[str, str]
    also: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shares: str | None = None
    arguments: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def bundle_of(self, module: Any, source: str) -> Any:
        """Return the entry points of a loaded module.

        Raises:
            BackendUnavailable: symbols, or arguments of theirs, are missing; all of them are named.
        """
        found = {field: _resolve(module, path, self.also.get(path)) for field, path in self.symbols.items()}
        missing = [self.symbols[field] for field, value in found.items() if value is None]
        if missing:
            raise self._lacks("entry points", ", ".join(missing), ", ".join(self.symbols.values()), module, source)
        wanted = [(field, name) for field, names in self.arguments.items() for name in names]
        untaken = [f"{self.symbols[field]}({name})" for field, name in wanted if not _takes(found[field], name)]
        if untaken:
            needed = ", ".join(f"{self.symbols[field]}({name})" for field, name in wanted)
            raise self._lacks("arguments of entry points", ", ".join(untaken), needed, module, source)
        return self.bundle(**found, module=module, source=source)

    def _lacks(self, what: str, missing: str, needed: str, module: Any, source: str) -> BackendUnavailable:
        version = getattr(module, "__version__", None)
        return BackendUnavailable(
            f"the kernel {self.name} lacks {what}",
            found=f"no {missing} in {source}" + (f", version {version}" if version else ""),
            needed=needed,
            hint=f"use a build of {self.repository} that has them",
        )


def _takes(entry: Entry, name: str) -> bool:
    """Whether an entry point takes an argument of that name; one that does not tell is taken at its word."""
    try:
        parameters = inspect.signature(entry).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _resolve(module: Any, path: str, also: str | None) -> Any:
    for dotted in (path, also):
        value = module
        for part in dotted.split(".") if dotted else ("",):
            value = getattr(value, part, None) if part else None
        if value is not None:
            return value
    return None


_DEEPGEMM = Kernel(
    name="deepgemm",
    repository="kernels-community/deep-gemm",
    version=2,
    revision=None,
    package="deep_gemm",
    bundle=DeepGemm,
    symbols={
        "bf16_nt": "m_grouped_bf16_gemm_nt_contiguous",
        "bf16_nn": "m_grouped_bf16_gemm_nn_contiguous",
        "fp8_fp4_nt": "m_grouped_fp8_fp4_gemm_nt_contiguous",
        "fp8_fp4_nn": "m_grouped_fp8_fp4_gemm_nn_contiguous",
        "fp8_fp4_plain": "fp8_fp4_gemm_nt",
        "cast_to_fp8": "utils.per_token_cast_to_fp8",
        "lay_out_scales": "transform_sf_into_required_layout",
        "mk_alignment": "get_mk_alignment_for_contiguous_layout",
    },
    # Upstream's 2.8 has it in the extension module alone.
    also={"get_mk_alignment_for_contiguous_layout": "_C.get_mk_alignment_for_contiguous_layout"},
)

_MEGAMOE = dataclasses.replace(
    _DEEPGEMM,
    name="deepgemm_megamoe",
    bundle=MegaMoe,
    symbols={
        "lay_out_scales": "transform_sf_into_required_layout",
        "cast_to_fp8": "utils.per_token_cast_to_fp8",
        "symmetric_buffer": "get_symm_buffer_for_mega_moe",
        "transform_weights": "transform_weights_for_mega_moe",
        "run": "fp8_fp4_mega_moe",
    },
    also={},
    shares="deepgemm",
)

_SONICMOE = Kernel(
    name="sonicmoe",
    repository="kernels-community/sonic-moe",
    version=None,
    revision="ep-support",
    package="sonicmoe",
    bundle=SonicMoe,
    symbols={"activation_type": "enums.ActivationType", "run": "moe_general_routing_inputs"},
    # Without it a build reads gate and up rows by turns, and halves would be computed wrong in silence.
    arguments={"run": ("concat_layout",)},
)

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (_DEEPGEMM, _MEGAMOE, _SONICMOE)}


def kernel_named(name: str) -> Kernel:
    """Return the kernel of that name, of its repository's or of its package's.

    Raises:
        UnknownBackend: there is none.
    """
    for kernel in KERNELS.values():
        if name in (kernel.name, kernel.repository, kernel.repository.rpartition("/")[2], kernel.package):
            return kernel
    raise UnknownBackend(
        "unknown kernel",
        found=repr(name),
        needed="one of " + ", ".join(KERNELS),
        hint="kernels of one's own are added with register_backend",
    )
