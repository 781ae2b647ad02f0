"""Experts on disk: reads one layer's experts out of a safetensors checkpoint, writes one layer back.

    files.py     where the tensors lie: one file or a sharded index, headers first, data only when asked for
    families.py  what a model family declares beyond the default layout, and the families refused
    declared.py  a config (or our own saved block) turned into layout flags, activation and gate
    scheme.py    what a config says of quantized experts
    names.py     tensor names of one layer turned into roles, stacked or one matrix per expert
    plan.py      which tensors make which parameter, from names and headers
    scales.py    scales of quantized experts: grids and dtypes from headers, then every value
    quantized.py quantized experts as they are stored, or as bfloat16
    read.py      the checks, then the reading
    write.py     the folder that read.py reads back

Nothing here knows ``ExpertWeights``: reading gives its keyword arguments, writing takes its attributes.
"""

from routed_experts.checkpoint.read import read_experts
from routed_experts.checkpoint.write import write_experts

__all__ = ["read_experts", "write_experts"]
