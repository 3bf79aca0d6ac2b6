"""The migration page for users of TRL, written from the tables of names.

``python -m tools.trl_page > docs/from_trl.md`` writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tools.settings_page import table
from verl_memopt.config.keys import flatten, shown, value_at
from verl_memopt.config.loader import compose_mapping
from verl_memopt.config.schema import Settings
from verl_memopt.config.spelling import DISTILL, GRPO, RLOO, Spelling
from verl_memopt.config.trl_defaults import DEFAULTS
from verl_memopt.config.trl_names import NO_EQUAL, SPELLINGS
from verl_memopt.memory.lora import PEFT
from verl_memopt.trl.config import PEFT_PASSES, PEFT_TARGETS
from verl_memopt.trl.logs import OURS
from verl_memopt.trl.trainer import REFUSED

_HEAD = """# From TRL

<!-- Written by `python -m tools.trl_page` from `verl_memopt/config/trl_names.py`; edit that, not this page. -->

This page is for you if you have a script or settings of TRL and want to train with them here: it says what each name of TRL does.
Give the names of `RLOOConfig`, `GRPOConfig` and `DistillationConfig` as they are, without a section, to any recipe of RLOO, GRPO
or distillation:

```bash
.venv/bin/verl-memopt train --config-dir recipe/rloo --config-name gsm8k \\
    data.train_files=train.parquet data.val_files=null actor_rollout_ref.model.path=Qwen/Qwen3-0.6B \\
    num_generations=8 max_completion_length=256 beta=0.05 epsilon=0.2 learning_rate=1e-6 max_steps=500
```

Three things can happen to a name:

- It is read as one of our keys: `num_generations=8 is TRL's spelling, read as actor_rollout_ref.rollout.n=8`. The value is
  converted where TRL counts something else.
- It has no effect here and is accepted: `disable_dropout=true does nothing here (...)`.
- It has no equal here and is refused, with what to use instead. One error lists all refused names.

One line of the log says how all names were read. The names mean the same on the command line, in a YAML file, as arguments of
`verl_memopt.train` and in a config of TRL.

A name takes precedence over a recipe. A name and our own key for the same setting on one command line are refused, and so are
an old and a new name of TRL, even if the values agree. The names are read where `algorithm.adv_estimator` is `rloo`,
`grpo` or `distill`.
With any other estimator a name of TRL is unknown, unless it is the last part of one of our keys. In a YAML file of your own, put
the names at the top level.
"""

_COUNTS = """## What is counted

TRL counts responses and optimizer steps, we count prompts and rollouts. Let `W` be the number of devices, `p` =
`per_device_train_batch_size`, `a` = `gradient_accumulation_steps`, `n` = `num_generations`, `i` = `num_iterations`, and `s` =
`steps_per_generation`: `a` where it is not given, and `a x num_mini_batches` in the older trainer.

| TRL | here |
| --- | --- |
| a rollout has `p x W x s` responses | `data.train_batch_size = p x W x s / n` prompts, with `n` responses each |
| a pass over it takes `s / a` optimizer steps | `actor_rollout_ref.actor.ppo_mini_batch_size = data.train_batch_size x a / s` |
| `max_steps` optimizer steps | `trainer.total_training_steps = max_steps x a / (s x i)`, rounded up |
| `total_episodes` responses | `trainer.total_training_steps = total_episodes / (data.train_batch_size x n)`, rounded up |
| `save_steps`, `eval_steps` | divided in the same way, and rounded up |

`p` does not decide memory here: a forward takes as many rows as fit into `actor_rollout_ref.actor.ppo_max_token_len_per_gpu`
tokens.
"""

_TRAINERS = """## Arguments of the trainers

[`verl_memopt.trl`](python.md#a-script-of-trl) reads the other arguments of `GRPOTrainer`, `RLOOTrainer`, `DistillationTrainer`,
`GKDTrainer`, `GOLDTrainer` and `SDFTTrainer`, and `reward_weights` of the first two configs as well. It refuses these
if they have a value:
"""

_METRICS = """## Metrics

`trainer.state.log_history` has TRL's names. Those of answers and rewards are computed as TRL computes them: `reward`,
`reward_std`, `rewards/NAME/mean`, `rewards/NAME/std`, `frac_reward_zero_std`, `num_tokens` and `completions/...`. In a
validation these names begin with `eval_`, or with `eval_NAME_` if `eval_dataset` has names. A validation answers each row
once, with the most likely tokens, unless `num_generations_eval` and `actor_rollout_ref.rollout.val_kwargs` say otherwise; TRL
samples as in training. `eval_loss` is the loss of the held-out answers under the policy that gave them, without a KL, if they
have rewards. The other entries are our metrics under TRL's names:

{}
`trainer.run.metrics` has our metrics under our names.
"""

_PEFT = f"""Of peft's `LoraConfig` it reads {", ".join(f"`{name}`" for name in PEFT)}. `lora_dropout` passes with a warning,
because adapters are computed without dropout. {", ".join(f"`{name}={value}`" for name, value in PEFT_PASSES.items())}
have no effect. Without `target_modules` it adapts {" and ".join(f"`{name}`" for name in PEFT_TARGETS)}, as peft does in most
models, or with `target_parameters` only the experts that these name. Any other field that is set is refused with its reason:
adapters have one rank, one scale and no further parts.

`debug` of a config is refused too, because [debug modes](debug_modes.md) have that name here.

A response for which every reward function returns `None` has no reward: it counts in no mean, its advantage is 0, and a warning
names the row, as in TRL.
"""

_DEFAULTS = """## Defaults that differ

In a script of TRL (`verl_memopt.trl`, or a config of TRL itself) TRL's defaults hold, and the log has a table of those that
differ from ours: 8 responses per device and step, 3 epochs, a linear schedule, generation with Hugging Face
(`use_vllm=false`), no validation unless `eval_strategy=steps`, the KL of `beta` (in distillation `beta` is the divergence). On
the command line and in `verl_memopt.train` a name that is not given has our default, or the recipe's. Give the name to get TRL's
default. The newer defaults are those of TRL 1.16, the older ones those of `RLOOConfig` in TRL 0.20.
"""

CONFIGS = {"grpo": "GRPOConfig", "rloo": "RLOOConfig", "distill": "DistillationConfig", "gkd": "GKDConfig", "sdft": "SDFTConfig"}
OLDER = {
    "num_generations": "2", "beta": "0.05", "temperature": "0.7", "num_iterations": "4", "max_completion_length": "53",
    "learning_rate": "5e-05", "lr_scheduler_type": "linear", "weight_decay": "0.0",
}  # fmt: skip
"""Name of TRL -> default in the older RLOO trainer."""

_READ = """## Names that are read

The newest name comes first, then the older ones.
"""

_NO_EQUAL = """## Names without an equal

A value in the second column is accepted. Any other value is refused. `null` is always accepted.
"""


def page() -> str:
    parts = [
        _HEAD,
        _COUNTS,
        _READ,
        _readable(),
        _NO_EQUAL,
        _without_equal(),
        _TRAINERS,
        _refused(),
        _metrics(),
        _PEFT,
        _DEFAULTS,
        _defaults(),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _readable() -> str:
    return table(("TRL", "here", "what is not the same"), [_row(spelling) for spelling in SPELLINGS])


def _row(spelling: Spelling) -> tuple[str, str, str]:
    only = {RLOO: "RLOO only", GRPO: "GRPO only", DISTILL: "distillation only"}.get(spelling.estimators, "")
    notes = [note for note in (only, spelling.note) if note]
    return _code(spelling.names), _code(spelling.keys), ": ".join(notes)


def _without_equal() -> str:
    rows = []
    for name, refusal in NO_EQUAL.items():
        # An empty list and an empty tuple are shown alike.
        passes = "any" if refusal.inert is None else ", ".join(dict.fromkeys(f"`{shown(value)}`" for value in refusal.inert))
        rows.append((f"`{name}`", passes, f"{refusal.reason}."))
    return table(("TRL", "passes", "why, and what to do"), rows)


def _metrics() -> str:
    rows = [(f"`{name}`", _code((ours,) if isinstance(ours, str) else ours)) for name, ours in OURS.items()]
    return _METRICS.replace("{}", table(("TRL", "here"), rows))


def _refused() -> str:
    return table(("argument", "why, and what to do"), [(f"`{name}`", f"{reason}.") for name, reason in REFUSED.items()])


def _defaults() -> str:
    recipe = flatten(compose_mapping("rloo_trainer", [])[0])
    rows = []
    for name, older in OLDER.items():
        key = next(row.keys[0] for row in SPELLINGS if name in row.names)
        ours = shown(recipe.get(key, value_at(Settings(), key)))
        rows.append(
            (
                f"`{name}`",
                *(shown(DEFAULTS[kind][name]) if name in DEFAULTS[kind] else "" for kind in CONFIGS),
                older,
                f"`{key}={ours}`",
            )
        )
    return table(("TRL", *(f"`{name}`" for name in CONFIGS.values()), "older RLOO", "here, in `rloo_trainer`"), rows)


def _code(words: Sequence[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


if __name__ == "__main__":
    sys.stdout.write(page())
