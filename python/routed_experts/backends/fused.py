"""`fused`: our own kernels, Triton on CUDA and Rust on CPU. Requirements only: not in this version."""

from __future__ import annotations

from .not_yet import refuse
from .spec import Backend, Spec

# Gates, norms and layouts of every kind are run, fused or as a step of their own; so little is asked.
_ANYWHERE = (
    {"kind": "dtype", "any_of": ["float32", "bfloat16", "float16"]},
    {"kind": "dynamic_activation_scales"},
    {"kind": "not_in_this_version"},
)

# No cost until there is code to measure.
BACKEND = Backend(
    rows=(
        (
            Spec(
                name="fused",
                path="triton",
                devices=("cuda",),
                requires=(
                    *_ANYWHERE,
                    {"kind": "capability", "min": (8, 0)},
                    {
                        # The E4M3 conversion instructions begin with SM89.
                        "kind": "when",
                        "formats": ["fp8_block", "mxfp8", "fp8_tensor"],
                        "then": {"kind": "capability", "min": (8, 9)},
                    },
                    {"kind": "package", "name": "triton", "min": "3.3"},
                ),
            ),
            refuse,
        ),
        (Spec(name="fused", path="rust", devices=("cpu",), requires=_ANYWHERE), refuse),
    )
)
