import dataclasses

import pytest
import torch
from torch import nn

from tests.critics import critic_batch, critic_for
from tests.memory.optimizers import policy_with, whole_share
from tests.tensors import whole_of
from tests.worker.test_policy import SMALL, policy_for, shares
from verl_memopt.errors import ConfigError
from verl_memopt.worker.trained_model import micro_batch, on_host, over_steps


def test_metrics_are_averaged_over_steps_and_counts_are_summed_over_the_steps_that_have_them():
    steps = [{"loss": 1.0, "skipped": 0.0}, {"loss": 4.0, "skipped": 1.0, "partial": 1.0}]
    tensors = [{name: torch.tensor(value) for name, value in step.items()} for step in steps]
    assert over_steps(tensors, ("skipped", "partial")) == {"loss": 2.5, "skipped": 1.0, "partial": 1.0}
    assert over_steps(tensors[:1], ("skipped", "partial")) == {"loss": 1.0, "skipped": 0.0}


def test_metrics_on_the_host_are_fp32():
    metrics = on_host({"double": torch.tensor(0.1, dtype=torch.float64), "count": torch.tensor(3)})
    assert {name: value.dtype for name, value in metrics.items()} == {"double": torch.float32, "count": torch.float32}
    assert float(metrics["count"]) == 3.0


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_loss_that_is_handed_in_is_what_is_trained(untied_folder, one_rank, role):
    """The sum of the squares of one norm has the gradient 2 w, and no other parameter has one."""
    owner = policy_for(untied_folder, one_rank, 1) if role == "actor" else critic_for(untied_folder, one_rank)
    trained, model = owner.trained, owner.model
    norm: nn.Parameter = model.decoder.norm.weight
    seen = []

    def loss(micro, counts, prefix_kv):
        seen.append((micro, counts, prefix_kv))
        value = (norm**2).sum() / 2
        return value, {f"{role}/loss": value.detach()}

    (mini,) = shares(critic_batch(), 1, SMALL)
    micros = [micro_batch(mini.batch, rows) for rows in mini.micro_batches]
    metrics = trained.accumulate(micros, mini.counts, loss)
    assert len(seen) == len(micros) >= 2
    assert all(counts is mini.counts and prefix_kv is None for _, counts, prefix_kv in seen)
    torch.testing.assert_close(norm.grad, len(micros) * norm.detach())
    assert float(metrics[f"{role}/loss"]) == pytest.approx(len(micros) * float((norm.detach() ** 2).sum()) / 2)
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == ["lm.model.norm.weight"]


def test_resident_tensors_are_parameters_gradients_and_optimizer_state(untied_folder, one_rank):
    critic, (mini,) = critic_for(untied_folder, one_rank), shares(critic_batch(), 1, SMALL)
    count = len(list(critic.model.parameters()))
    assert [kind for kind, _ in critic.trained.resident_tensors()] == ["params"] * count
    critic.update([mini])
    critic.trained.accumulate([micro_batch(mini.batch, rows) for rows in mini.micro_batches], mini.counts, critic.loss)
    kinds = [kind for kind, _ in critic.trained.resident_tensors()]
    # Two moments and a counter of steps for each parameter.
    assert [kinds.count(kind) for kind in ("params", "grads", "optimizer")] == [count, count, 3 * count]


def test_an_update_in_backward_needs_one_micro_batch_and_names_the_critics_keys(untied_folder, one_rank):
    in_backward = dataclasses.replace(critic_for(untied_folder, one_rank).settings.optim, in_backward=True, clip_grad=None)
    critic, (mini,) = critic_for(untied_folder, one_rank, optim=in_backward), shares(critic_batch(), 1, SMALL)
    with pytest.raises(ConfigError, match=r"critic\.optim\.in_backward=true: .* Raise critic\.ppo_max_token_len_per_gpu"):
        critic.update([mini])
    plain = critic_for(untied_folder, one_rank, optim=dataclasses.replace(in_backward, in_backward=False, bucket_megabytes=1))
    whole = dataclasses.replace(mini, micro_batches=[list(range(16))])
    for each in (critic, plain):
        for _ in range(2):
            each.update([whole])
    for (name, one), (_, other) in zip(critic.model.named_parameters(), plain.model.named_parameters(), strict=True):
        assert (one - other).abs().max() <= 1e-6, name


def test_an_unknown_optimizer_is_refused_under_the_roles_key(untied_folder, one_rank):
    wrong = dataclasses.replace(critic_for(untied_folder, one_rank).settings.optim, optimizer="NoSuch")
    with pytest.raises(ConfigError, match=r"critic\.optim\.optimizer_impl=torch\.optim, optimizer=NoSuch"):
        critic_for(untied_folder, one_rank, optim=wrong)


@pytest.mark.parametrize(
    ("fsdp", "optim", "reported"),
    [
        ({"dtype": "bfloat16", "optimizer_offload": True}, {}, True),
        ({"dtype": "bfloat16", "split_master_weights": True}, {}, True),
        ({"dtype": "bfloat16"}, {"in_backward": True, "clip_grad": None}, True),
        ({"dtype": "bfloat16"}, {"optimizer": "SGD"}, True),
        ({"dtype": "bfloat16"}, {}, False),
        ({"dtype": "fp32", "optimizer_offload": True}, {}, False),
    ],
)
def test_the_share_of_weights_that_changed_is_reported_where_buckets_of_half_precision_are_compared(
    tiny_folder, one_rank, fsdp, optim, reported
):
    policy = policy_with(tiny_folder, one_rank, fsdp=fsdp, lr=3e-3, **optim)
    before = [whole_of(each).detach().clone().bfloat16() for each in policy.model.parameters()]
    metrics = policy.update([whole_share()], 1.0)
    assert ("actor/changed_weights" in metrics) is reported
    after = [whole_of(each).detach().bfloat16() for each in policy.model.parameters()]
    changed = sum(int((one != other).sum()) for one, other in zip(before, after, strict=True))
    assert changed > 0
    if reported:
        share = changed / sum(each.numel() for each in before)
        assert metrics["actor/changed_weights"] == pytest.approx(share, rel=1e-5)
