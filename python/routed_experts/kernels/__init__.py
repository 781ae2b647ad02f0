"""Kernels of our own in Triton: imported when `fused` or a layout on a CUDA device first needs them."""
