"""Write ``docs/models.md`` from the table of families: ``python -m tools.models_page > docs/models.md``."""

from __future__ import annotations

import sys

from verl_memopt.model import families
from verl_memopt.model.families import Family, family_of

HEAD = """# Which models

<!-- Written by `python -m tools.models_page` from `FAMILIES` in `verl_memopt/model/families.py`; edit that, not this page. -->

This page is for you if you want to know whether your model can be trained: it lists the models of transformers that can. Look for
the `model_type` in its `config.json`. If that is in the first table, set `actor_rollout_ref.model.path` to the model's folder,
or to its name on the hub, and read no further.

## Models that work

A test compares the log-probs and the gradients of each of these types with those of transformers' own forward, for rows
alone and for rows that share a prompt ([shared prompts](shared_prompt.md)). Types whose config can set a sliding window are
compared with a window that is shorter than the prompts. *Knobs inside blocks* says whether our own decoder computes the
model. Only there do `recompute_elementwise`, `prune_last_block` and `tiled_mlp` act ([knobs](memory.md)). In the other models
`tiled_mlp` is refused, and the other two have no effect, which a line of the log says.

Some models read images too. Their text part is trained, as a language model of its own: the rows must be text. The rest of such a
model, and a head for drafting (`mtp`), is never loaded. A saved model gets a copy of it, byte for byte, with the config and the
processor's files of the folder that training started from. So it loads wherever that folder loads. The engine of a run gets the
text part alone (`engine_config` in the run folder). The head for drafting still expects the model before training, so an engine
that drafts with it may accept fewer drafts.

On a GPU, kernels of flash-linear-attention compute the linear layers of Qwen3.5 [if they are installed](get_started.md#on-a-gpu).

| `model_type` | models | knobs inside blocks | also |
|---|---|---|---|
"""

REFUSED = """
## Models that are refused

A model is refused where its log-probs would be wrong or could not be computed. The error names the type and the reason,
which the table repeats as a sentence that begins with "models of this type". Layers that carry a state from token to token
would carry it from one packed row into the next. Mixtures of experts differ in their routers and in the names of their weights,
so only those in the first table are supported.

| `model_type` | models | models of this type |
|---|---|---|
"""

FOOT = """
## Any other model

A type that is in neither table may still work. Three checks decide, and each runs as early as possible.

1. The config is read. It shows encoders, other inputs than text without a known text part, layers that carry state, factors
   of the logits that no row of the table names, mixtures of experts and windows. Rows longer than the trained length of a
   LongRoPE or dynamic rotary embedding are refused too.
2. The model is built without weights, before any worker starts. This shows whether transformers can build it with attention
   over packed rows, where its blocks and its head are, and whether its checkpoint names the weights as the model does.
3. The model with its weights computes a few random rows in each worker: packed, packed beside other rows, and alone. The
   results must agree.

A model that passes all three checks can be trained. [Check packed rows when a model is loaded](decisions/models.md) has
the bounds and the reasons. To add a type to the tables, see [A model family](extend.md#a-model-family).
"""


def page() -> str:
    works = "".join(_works(family) for family in families.FAMILIES if family.refused is None)
    refused = (f"| `{one.model_type}` | {one.models} | {one.refused} |\n" for one in families.FAMILIES if one.refused is not None)
    return f"{HEAD}{works}{REFUSED}{''.join(refused)}{FOOT}"


def _works(family: Family) -> str:
    own = "yes" if family_of(family.text or family.model_type).classes else ""
    return f"| `{family.model_type}` | {family.models} | {own} | {family.note} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
