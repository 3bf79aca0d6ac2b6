"""Settings of runs on published models, and what ``verl-memopt fit`` says of them."""

from verl_memopt.cli import main
from verl_memopt.config.loader import load_settings
from verl_memopt.plan.verdict import Card, judge

AR = "actor_rollout_ref"
FSDP = f"{AR}.actor.fsdp_config"
DYNAMIC = f"{AR}.actor.use_dynamic_bsz=true"
TWO_COPIES = f"{FSDP}.param_offload=true"
"""A key of the user's own, with which a profile of a card holds a copy of the weights for trainer and engine each."""


def settings_of(*overrides, config="rloo_trainer"):
    return load_settings(config, ["data.train_files=none", "data.val_files=null", *overrides])


def verdict(*overrides, card=24):
    return judge(settings_of(*overrides), card if isinstance(card, Card) else Card.of(card))


def said(capsys, *arguments):
    """Gives the exit code of the command and what it prints."""
    code = main(["fit", "--config-name", "rloo_trainer", *arguments])
    return code, capsys.readouterr().out
