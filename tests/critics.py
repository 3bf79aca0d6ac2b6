"""Critics to test: a folder with a value head, a batch with values and returns, and the same values computed naively."""

import dataclasses
import shutil

import torch
from transformers import AutoModelForTokenClassification

from tests.tensors import whole_of
from tests.worker.test_policy import batch
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.keys import replaced
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import Critic, CriticModel, Optim, TrainedFsdp
from verl_memopt.model.assembly import build_critic, materialize_critic
from verl_memopt.model.weights import named_weights
from verl_memopt.worker.policy import TrainedCritic
from verl_memopt.worker.trained_model import MiniBatch

CPU = torch.device("cpu")
CRITIC = Critic(
    use_dynamic_bsz=True,
    loss_agg_mode="token-mean",
    cliprange_value=0.2,
    optim=Optim(lr=1e-2),
    model=CriticModel(
        enable_gradient_checkpointing=False, trust_remote_code=False, attn_implementation="sdpa",
        fsdp_config=TrainedFsdp(dtype="fp32"),
    ),
)  # fmt: skip


def with_value_head(folder, out, seed=0, bias=True):
    """Copy a model as transformers' token classifier with one label and a random head."""
    model = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(model.score.weight.shape, generator=generator) * 0.3)
        model.score.bias.fill_(0.25 if bias else 0.0)
    model.save_pretrained(out)
    for file in folder.glob("tokenizer*"):
        shutil.copyfile(file, out / file.name)
    return out


def critic_for(folder, mesh, world_size=1, model=None, fsdp=None, fill=True, **settings):
    """Return a critic in fp32 without memory knobs, unless ``model`` or ``fsdp`` say otherwise."""
    section = replaced(CRITIC.model, {**(model or {}), "path": str(folder)})
    section = replaced(section, {"fsdp_config": replaced(section.fsdp_config, fsdp or {})})
    value_model = build_critic(section, folder, mesh, CPU)
    if fill:
        materialize_critic(value_model, folder, CPU)
    return TrainedCritic(value_model, replaced(CRITIC, {**settings, "model": section}), 10, world_size, CPU)


def critic_batch(rows=16, seed=0, shared=False):
    """Return rows with old values and returns. ``shared``: the four rows of a group have one prompt, computed once."""
    whole = batch(rows, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    if shared:
        whole.prompts = whole.prompts.select([row - row % 4 for row in range(rows)])
        whole.prompt_group = whole.group.clone()
    tokens = int(whole.responses.lengths.sum())
    old_values, returns = (torch.randn(tokens, generator=generator) for _ in range(2))
    return dataclasses.replace(whole, old_values=old_values, returns=returns, old_log_probs=None, ref_log_probs=None)


def naive_values(model, whole):
    """Return fp32 [R] from transformers' token classifier, row by row: the label of the token before each response token."""
    parts = []
    for prompt, response in zip(whole.prompts.rows(), whole.responses.rows(), strict=True):
        labels = model(torch.cat([prompt, response])[None]).logits[0, :, 0]
        parts.append(labels[len(prompt) - 1 : -1] if len(response) else labels[:0])
    return torch.cat(parts)


CRITIC_PHASES = {
    "values": "values", "update_critic": "update_critic", "save_critic": "save_checkpoint", "load_critic": "load_checkpoint",
}  # fmt: skip
"""Method of a worker -> the phase in which the trainer calls it."""


def critic_plan(folder, more=None):
    """Return the fields of a worker's plan that build a critic from the settings ``more``."""
    settings = {
        "data.train_files": "none",
        "data.val_files": None,
        "algorithm.adv_estimator": "gae",
        "actor_rollout_ref.model.path": str(folder),
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "critic.model.enable_gradient_checkpointing": False,
        "critic.model.fsdp_config.dtype": "fp32",
        "critic.optim.lr": 1e-3,
    }
    critic = settings_from_mapping(settings | (more or {})).critic
    return {"critic": critic, "critic_folder": str(folder), "critic_schedule_steps": 10}


def call_critic(worker, method, *args, track=False):
    """Call a worker's critic in its phase, and return the reply."""
    return worker.call(CRITIC_PHASES[method], track, method, *args)


def critic_mini(rows=4):
    """Return a mini-batch of one micro-batch, with old values and return."""
    whole = critic_batch(rows)
    return MiniBatch(whole, [list(range(rows))], GlobalCounts(float(whole.responses.lengths.sum()), float(rows)))


def critic_weights(worker):
    """Return the whole weights of a worker's critic, on the device or on the host."""
    with worker.residency.phase("values"):
        return {name: whole_of(parameter).detach().clone() for name, parameter in named_weights(worker.critic.model)}
