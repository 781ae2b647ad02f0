"""Choose the experts' backend of each backbone of a vision-language model.

A composite model has a config of its own and one for each backbone; Qwen3-VL-MoE has ``vision_config`` and
``text_config``, with the experts under the second. A small one with random weights reads a picture and a question;
each step below prints which part runs on what, and how far the logits are from transformers' eager loop.

1. At load: ``from_pretrained(path, experts_implementation={"": "eager", "text_config": "routed_experts_grouped_mm"})``.
2. ``model.set_experts_implementation({"text_config": ...})``: the method of transformers, with our names inside it.
   A part that the dict leaves out stays as it is.
3. ``rx.set_experts_implementation(model, {"": ...})``: the same for any torch model, with bare names. Here ``""`` is
   the value of every part that the dict does not name; all of it takes effect, or nothing.
4. A part that does not exist is refused, and changes nothing.
5. What ``rx.get_experts_implementation`` returned can be set again, transformers' own functions included.

The exit status is 1 if any logits are further from eager's than ``TOLERANCE``.

    python examples/vlm_per_backbone.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

import routed_experts as rx

TOLERANCE = 1e-4
IMAGE, IMAGE_START, IMAGE_END = 250, 251, 252
GRID = 1, 4, 4  # frames, rows and columns of patches; four patches become one token
PATCH = 3 * 2 * 4 * 4  # colours, frames, height and width of a patch


def make_checkpoint(folder: Path) -> None:
    """Save a small Qwen3-VL-MoE with random float32 weights."""
    torch.manual_seed(0)
    text = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    config = transformers.Qwen3VLMoeConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=253,
        vision_start_token_id=IMAGE_START,
        vision_end_token_id=IMAGE_END,
    )
    transformers.Qwen3VLMoeForConditionalGeneration(config).save_pretrained(folder)


def picture_and_question(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the inputs that a processor would make, a token a byte."""
    frames, rows, columns = GRID
    patches = frames * rows * columns
    tokens = [IMAGE_START, *[IMAGE] * (patches // 4), IMAGE_END, *b"What is in the picture?"]
    input_ids = torch.tensor([tokens], device=device)
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "pixel_values": torch.randn(patches, PATCH, generator=torch.Generator().manual_seed(0)).to(device),
        "image_grid_thw": torch.tensor([GRID], device=device),
        "mm_token_type_ids": (input_ids == IMAGE).int(),
    }


class Steps:
    """A model, what eager answers, and the table of the steps."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.model = model
        self.inputs = picture_and_question(model.device)
        self.table = Table("step", *map(repr, rx.get_experts_implementation(model)), "difference from eager")
        self.equal = True
        # Step 5 of the list above: what was read is set again.
        at_load = rx.get_experts_implementation(model)
        rx.set_experts_implementation(model, "transformers:eager")
        self.expected = model(**self.inputs).logits
        rx.set_experts_implementation(model, at_load)

    def show(self, step: str) -> None:
        """Run the model; add a row: the step, what each part runs on, how far the logits are from eager's."""
        apart = float((self.model(**self.inputs).logits - self.expected).abs().max() / self.expected.abs().max())
        near = apart <= TOLERANCE
        self.equal &= near
        difference = f"{apart:.1e}" if near else f"[bold red]{apart:.1e} > {TOLERANCE:.0e}[/]"
        self.table.add_row(step, *rx.get_experts_implementation(self.model).values(), difference)


def take_steps(model: transformers.PreTrainedModel, console: Console) -> bool:
    """Switch as the list above says and print what happened; return whether the logits stayed eager's."""
    steps = Steps(model)
    steps.show("as loaded")
    model.set_experts_implementation({"text_config": "routed_experts_batched_mm"})
    steps.show("model.set_..., text_config")
    rx.set_experts_implementation(model, {"": "auto"})
    steps.show('rx.set_..., ""')
    rx.set_experts_implementation(model, {"": "transformers:grouped_mm", "text_config": "eager"})
    steps.show("rx.set_..., both")
    before = rx.get_experts_implementation(model)
    try:
        rx.set_experts_implementation(model, {"text_config": "grouped_mm", "audio_config": "grouped_mm"})
    except rx.LayoutError as error:
        refusal = f"Refused: {error.found}; needed: {error.needed}."
    steps.show("rx.set_..., a part too many")
    console.print(steps.table, refusal)
    return steps.equal and rx.get_experts_implementation(model) == before


@torch.no_grad()
def main() -> int:
    """Make the checkpoint, load it, switch; 0 if the logits stayed eager's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    rx.register_with_transformers()
    # Into a file or a pipe, rich would fold the tables at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 140)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder,
            dtype=torch.float32,
            experts_implementation={"": "eager", "text_config": "routed_experts_grouped_mm"},
        ).to(options.device)
    return 0 if take_steps(model, console) else 1


if __name__ == "__main__":
    sys.exit(main())
