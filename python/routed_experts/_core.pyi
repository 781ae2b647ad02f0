"""The Rust extension module; private, its users are the Python files named in each group."""

__all__ = ["__version__", "layout_build", "layout_first_out_of_range"]

__version__: str

# layout.py: addresses and lengths of contiguous CPU tensors; dtype is a code of layout._ID_CODES.
def layout_build(
    ids: int,
    dtype: int,
    pairs: int,
    num_experts: int,
    alignment: int,
    threads: int,
    out: int,
    out_len: int,
    /,
) -> None: ...
def layout_first_out_of_range(ids: int, dtype: int, pairs: int, num_experts: int, /) -> int | None: ...
