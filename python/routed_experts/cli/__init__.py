"""The command line ``routed-experts``."""

from __future__ import annotations

import click

from routed_experts import _core
from routed_experts.cli.bench import bench
from routed_experts.cli.doctor import doctor
from routed_experts.cli.select import select
from routed_experts.cli.tune import tune
from routed_experts.cli.warmup import warmup


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_core.__version__, prog_name="routed-experts")
def main() -> None:
    """Run the experts of Mixture-of-Experts layers: what works here, and which backend fits."""


main.add_command(bench)
main.add_command(doctor)
main.add_command(select)
main.add_command(tune)
main.add_command(warmup)
