"""Draws docs/images/shared_prompt_mask.png: which token sees which in a pack, from the mask that kernels are tested against.

python docs/shared_prompt_mask.py
"""

from pathlib import Path

import torch

from verl_memopt.model.attention import visible
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.observe.chart_style import figure, save, style

GROUP = (6, (3, 4, 2))
"""A prompt of six tokens, and answers of three, four and two."""
NAMES = ["prompt", "answer 1", "answer 2", "answer 3"]


def main(folder: Path) -> Path:
    """Draw the picture into a folder and return its path."""
    lengths = [GROUP[0], *GROUP[1]]
    total = sum(lengths)
    shared = visible(PrefixLayout.of((GROUP,)).stops, None, torch.device("cpu")).float()
    repeated = torch.block_diag(*(torch.ones(GROUP[0] + n, GROUP[0] + n).tril() for n in GROUP[1]))
    drawing = figure(9.5, 5.2)
    whole, once = drawing.subplots(1, 2)
    count = repeated.shape[0]
    for axes, mask, title in (
        (whole, repeated, f"the prompt with each answer: {count} tokens"),
        (once, shared, f"the prompt once: {total} tokens"),
    ):
        style(axes, title, "sees", "token")
        axes.grid(visible=False)
        axes.imshow(mask, cmap="Blues", vmin=0, vmax=1.6, interpolation="nearest")
    for axes, blocks in ((whole, [part for n in GROUP[1] for part in (GROUP[0], n)]), (once, lengths)):
        edges = torch.tensor([0, *blocks]).cumsum(0) - 0.5
        for edge in edges[1:-1]:
            axes.axhline(edge, color="#888888", linewidth=0.6)
            axes.axvline(edge, color="#888888", linewidth=0.6)
        names = NAMES if axes is once else [name for answer in NAMES[1:] for name in ("prompt", answer)]
        centres = (edges[1:] + edges[:-1]) / 2
        axes.set_yticks(centres.tolist(), names, fontsize=8)
        axes.set_xticks(centres.tolist(), names, fontsize=8, rotation=60, ha="right")
    return save(drawing, folder / "shared_prompt_mask.png")


if __name__ == "__main__":
    main(Path(__file__).parent / "images")
