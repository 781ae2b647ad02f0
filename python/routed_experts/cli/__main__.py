"""``python -m routed_experts.cli``, for where the script is not on the path."""

from routed_experts.cli import main

main(prog_name="routed-experts")
