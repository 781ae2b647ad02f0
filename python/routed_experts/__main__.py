"""``python -m routed_experts``: the command line, for where its script is not on the path."""

from routed_experts.cli import main

if __name__ == "__main__":
    main(prog_name="routed-experts")
