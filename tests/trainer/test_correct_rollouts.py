import math
from dataclasses import replace

import pytest
import torch

from tests.algorithms.modes import LOSSES
from tests.config.conftest import LEAST
from tests.trainer.conftest import AR, Member, batch_of, group_of
from tests.trainer.test_step import running
from verl_memopt.config.aliases import PRESETS
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.errors import ConfigError, RolloutError
from verl_memopt.trainer.correct_rollouts import (
    LIMIT_FP8_CACHE,
    LIMIT_FP32,
    LIMIT_HALF,
    BypassUpdate,
    MismatchCheck,
    correct_before_update,
    log_prob_limit,
    same_distribution,
)
from verl_memopt.worker.policy import LogProbs, Objective
from verl_memopt.worker.trained_model import micro_batches_of

LENGTHS = [4, 1, 0, 3, 2, 2, 4, 4]
KEY = "algorithm.rollout_correction"


def drifted():
    """Gives a batch whose engine, old policy and present policy (in the place of the reference) all differ."""
    batch, generator = batch_of(LENGTHS), torch.Generator().manual_seed(5)
    engine, drift, change, advantages = (torch.randn(sum(LENGTHS), generator=generator) for _ in range(4))
    batch.rollout_log_probs, batch.old_log_probs = engine - 3, engine - 3 + 0.4 * drift
    batch.ref_log_probs, batch.advantages = batch.old_log_probs + 0.3 * change, advantages
    return batch


def lists(flat):
    return [part.tolist() for part in flat.split(LENGTHS)]


def test_weights_and_kept_tokens_come_from_old_and_engine_log_probs():
    batch = drifted()
    settings = replace(PRESETS["decoupled_token_is"], rollout_rs="seq_mean_k3", rollout_rs_threshold=0.1)
    metrics = correct_before_update(batch, settings)
    ratios = lists((batch.old_log_probs - batch.rollout_log_probs).exp())
    assert batch.weights.tolist() == pytest.approx([min(r, 2.0) for row in ratios for r in row], rel=1e-6)
    k3 = [sum(r - 1 - math.log(r) for r in row) / max(len(row), 1) for row in ratios]
    assert batch.kept.tolist() == [row <= 0.1 for row, size in zip(k3, LENGTHS, strict=True) for _ in range(size)]
    assert batch.kept_sizes() == [size if row <= 0.1 else 0 for row, size in zip(k3, LENGTHS, strict=True)]
    assert 0 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(batch.weights.mean().item(), rel=1e-6)


def test_without_a_token_there_is_nothing_to_correct():
    batch = batch_of([0, 0])
    batch.rollout_log_probs = batch.old_log_probs
    assert correct_before_update(batch, PRESETS["decoupled_seq_is"]) == {}
    assert batch.weights is None


def naive_loss(batch, agg_mode):
    """PPO's clipped loss with weights and rejected tokens, row by row; means count kept tokens alone."""
    parts = map(lists, (batch.ref_log_probs, batch.old_log_probs, batch.advantages, batch.weights, batch.kept))
    rows = []
    for row in zip(*parts, strict=True):
        losses = []
        for new, old, advantage, weight, kept in zip(*row, strict=True):
            ratio = math.exp(new - old)
            objective = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            objective = max(objective, 3 * advantage) if advantage < 0 else objective
            losses += [-objective * weight] if kept else []
        rows.append(losses)
    if agg_mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    return sum(sum(row) / len(row) for row in rows if row) / len(rows)


def shares_of(update, batch, bypass=None, mean_weight=None):
    """Gives for each mini-batch its loss, the sum of the shares of all micro-batches and ranks."""
    losses = []
    for minis in zip(*update.cut(batch, "abcdefgh", 3), strict=True):
        counts = replace(minis[0].counts, mean_weight=mean_weight)
        micros = [micro for mini in minis for micro in micro_batches_of(mini.batch, mini.micro_batches, False)]
        objectives = [Objective(micro, counts, update.actor, bypass) for micro in micros]
        losses.append(sum(own.loss(own.micro.ref_log_probs, None)[0].item() for own in objectives))
    return losses


def update_of(alike, ranks, rows, **actor):
    sizes = {f"{AR}.actor.use_dynamic_bsz": False, f"{AR}.actor.ppo_micro_batch_size_per_gpu": rows}
    own = {f"{AR}.actor.{name.replace('__', '.')}": value for name, value in actor.items()}
    return alike(sizes | {f"{AR}.actor.ppo_mini_batch_size": 4} | own, group_of(*map(Member, range(ranks)))).policy.policy_update


WAYS = [(1, 8), (1, 3), (1, 1), (2, 1), (4, 2)]
"""Ranks, and rows of a micro-batch."""


@pytest.mark.parametrize("agg_mode", ["token-mean", "seq-mean-token-mean"])
def test_the_corrected_loss_of_a_mini_batch_is_its_definition_however_it_is_cut(alike, agg_mode):
    batch = drifted()
    correct_before_update(batch, replace(PRESETS["decoupled_token_is"], rollout_rs="token_k1", rollout_rs_threshold="0.7_1.4"))
    assert 0 < batch.kept.float().mean() < 1
    for ranks, rows in WAYS:
        (loss,) = shares_of(update_of(alike, ranks, rows, loss_agg_mode=agg_mode), batch)
        assert loss == pytest.approx(naive_loss(batch, agg_mode), rel=1e-6)


@pytest.mark.parametrize("mode", [mode for mode in LOSSES if not mode.endswith("_cov")])
def test_every_loss_takes_the_correction_however_its_mini_batch_is_cut(alike, mode):
    batch, plain = drifted(), drifted()
    correct_before_update(batch, replace(PRESETS["decoupled_seq_is"], rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0"))
    losses = [shares_of(update_of(alike, ranks, rows, policy_loss__loss_mode=mode), batch)[0] for ranks, rows in WAYS]
    assert losses == pytest.approx([losses[0]] * len(WAYS), rel=1e-5, abs=1e-7)
    assert losses[0] != pytest.approx(shares_of(update_of(alike, 1, 8, policy_loss__loss_mode=mode), plain)[0], rel=1e-2)


BYPASS = {
    "clip": PRESETS["bypass_ppo_clip"],
    "clip, rejection": replace(PRESETS["bypass_ppo_clip"], rollout_rs="seq_mean_k3", rollout_rs_threshold=0.1),
    "reinforce": PRESETS["bypass_pg_is"],
    "reinforce, normalised": replace(PRESETS["bypass_pg_is"], rollout_is="token", rollout_is_batch_normalize=True),
}


@pytest.mark.parametrize("name", BYPASS)
def test_the_loss_of_bypass_mode_does_not_depend_on_how_its_mini_batch_is_cut(alike, name):
    batch = drifted()
    batch.old_log_probs = batch.rollout_log_probs
    losses = [shares_of(update_of(alike, ranks, rows), batch, BYPASS[name], 1.3)[0] for ranks, rows in WAYS]
    assert losses == pytest.approx([losses[0]] * len(WAYS), rel=1e-5, abs=1e-7)


class Scorer(Member):
    """Reads the present policy's log-probs from where the test put them."""

    def old_log_probs(self, batch, micro_batches, with_entropy):
        return LogProbs(batch.ref_log_probs, None)


@pytest.mark.parametrize(("level", "ranks"), [("token", 1), ("token", 2), ("sequence", 1), ("sequence", 4)])
def test_the_mean_weight_is_that_of_the_whole_mini_batch(alike, level, ranks):
    workers, batch = group_of(*map(Scorer, range(ranks))), drifted()
    batch.old_log_probs = batch.rollout_log_probs
    settings = replace(PRESETS["bypass_pg_is"], rollout_is=level)
    update = update_of(alike, ranks, 1)
    minis = [rank[0] for rank in update.cut(batch, "abcdefgh", 1)]
    rows = lists(batch.ref_log_probs - batch.rollout_log_probs)
    values = [log for row in rows for log in row] if level == "token" else [sum(row) for row in rows if row]
    expected = sum(min(math.exp(value), 2.0) for value in values) / len(values)
    assert BypassUpdate(workers, update, None, settings).mean_weight(minis) == pytest.approx(expected, rel=1e-6)


def run(settled, more, steps=1):
    """Gives the metrics of the last of some steps, and the names of its phases."""
    guarded = {f"{AR}.actor.policy_loss.loss_mode": "vanilla", f"{AR}.rollout.max_logprob_diff": 1e-4}
    with running(settled(guarded | more)) as learner:
        results = [learner.train_step(step).metrics for step in range(1, steps + 1)]
        phases = [span.name for span in learner.workers.clock.take()]
    return results[-1], phases


def test_where_engine_and_trainer_agree_a_correction_changes_nothing(settled):
    plain, _ = run(settled, {}, 1)
    for name in ("decoupled_token_is", "decoupled_geo_rs_seq_tis", "bypass_ppo_clip", "bypass_ppo_clip_k3_rs"):
        metrics, phases = run(settled, {f"{KEY}.preset": name}, 1)
        assert ("old_log_prob" in phases) == name.startswith("decoupled")
        for key in ("actor/loss", "actor/grad_norm", "actor/ppo_kl"):
            assert metrics[key] == pytest.approx(plain[key], rel=2e-3, abs=2e-5), (name, key)
        assert metrics["rollout_corr/kl"] == pytest.approx(0, abs=2e-2)
        assert metrics["rollout/logprob_diff_mean"] < 1e-4


def test_weights_of_bypass_mode_are_normalised_over_each_mini_batch_after_a_pass_of_their_own(settled):
    own = {f"{KEY}.preset": "bypass_pg_is", f"{KEY}.rollout_is_batch_normalize": True, f"{KEY}.rollout_is": "token"}
    metrics, phases = run(settled, own)
    assert phases.count("old_log_prob") == phases.count("update_actor") == 2  # two mini-batches
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(1, abs=0.05)
    assert metrics["actor/skipped_updates"] == 0
    assert metrics["actor/grad_norm"] > 0


def test_with_several_epochs_the_log_probs_are_those_of_the_first(settled):
    more = {f"{AR}.actor.ppo_epochs": 2, f"{AR}.actor.shuffle": True}
    metrics, phases = run(settled, more | {f"{KEY}.preset": "bypass_ppo_clip"})
    assert phases.count("update_actor") == 1
    assert metrics["rollout/logprob_diff_mean"] < 1e-4
    assert metrics["training/log_probs_not_finite"] == 0


def test_a_critic_leaves_out_the_tokens_that_a_correction_rejects(settled):
    more = {
        "algorithm.adv_estimator": "gae",
        f"{AR}.actor.ppo_mini_batch_size": 4,
        f"{AR}.actor.policy_loss.loss_mode": "vanilla",
    }
    more |= {f"{KEY}.rollout_is": "token", f"{KEY}.rollout_rs": "token_k1", f"{KEY}.rollout_rs_threshold": "0.7_1.4"}
    with running(settled(more)) as learner:
        batch = learner.scored(1)
        rows = batch.rows
        drift = 0.5 * torch.randn(rows.old_log_probs.shape, generator=torch.Generator().manual_seed(3))
        rows.rollout_log_probs = rows.old_log_probs - drift
        batch.rows.old_values = learner.critic.values(batch)
        learner.advantages(batch)
        batch.metrics |= learner.critic.begin_update(*batch.for_update(), 1).result()
        learner.policy.update(batch)
    assert 0 < rows.kept.float().mean() < 1
    assert not rows.old_values.any()  # the value head starts at 0
    assert batch.metrics["critic/vf_loss"] == pytest.approx(0.5 * rows.returns[rows.kept].square().mean().item(), rel=1e-5)
    assert batch.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(rows.weights.mean().item(), rel=1e-6)
    assert batch.metrics["actor/grad_norm"] > 0
    assert batch.metrics["actor/skipped_updates"] == batch.metrics["critic/skipped_updates"] == 0


@pytest.mark.parametrize("preset", ["bypass_ppo_clip", "bypass_pg_is"])
def test_bypass_mode_goes_with_a_critic_and_its_warm_up(settled, preset):
    more = {"algorithm.adv_estimator": "gae", "trainer.critic_warmup": 2, f"{KEY}.preset": preset}
    metrics, phases = run(settled, more, 2)
    assert "old_log_prob" not in phases
    assert (phases.count("values"), phases.count("update_critic"), phases.count("update_actor")) == (2, 2, 1)
    assert metrics["critic/vf_loss"] > 0
    assert metrics["actor/grad_norm"] > 0
    assert metrics["rollout/logprob_diff_mean"] < 1e-4


def test_metrics_of_mini_batches_are_averaged_and_counts_and_bytes_are_added(settled):
    offload = {f"{AR}.model.enable_activation_offload": True, f"{AR}.model.activation_offload_min_bytes": 0}
    both = [run(settled, offload | more)[0] for more in ({}, {f"{KEY}.preset": "bypass_ppo_clip"})]
    moved = [metrics["memory/activation_offload/bytes_moved"] for metrics in both]
    assert moved[0] == moved[1] > 0
    assert both[1]["actor/lr"] == both[0]["actor/lr"]
    assert both[1]["actor/loss"] == pytest.approx(both[0]["actor/loss"], rel=1e-3, abs=2e-5)


def limit(engine="fp32", compute="fp32", **more):
    dtypes = {f"{AR}.rollout.dtype": engine, f"{AR}.actor.fsdp_config.dtype": compute, f"{AR}.rollout.name": "vllm"}
    roles = settings_from_mapping(LEAST | dtypes | {f"{AR}.{k}": v for k, v in more.items()}).actor_rollout_ref
    return log_prob_limit(roles.rollout, roles.actor.fsdp_config)


@pytest.mark.parametrize(
    ("engine", "compute", "more", "expected"),
    [
        ("fp32", "fp32", {}, LIMIT_FP32),
        ("bfloat16", "fp32", {}, LIMIT_HALF),
        ("fp32", "bfloat16", {}, LIMIT_HALF),
        ("fp16", "bfloat16", {}, LIMIT_HALF),
        ("fp32", "fp32", {"actor.fsdp_config.model_dtype": "bfloat16"}, LIMIT_HALF),
        ("fp32", "fp32", {"rollout.kv_cache_dtype": "bfloat16"}, LIMIT_HALF),
        ("bfloat16", "bfloat16", {"rollout.kv_cache_dtype": "fp8"}, LIMIT_FP8_CACHE),
    ],
    ids=str,
)
def test_the_limit_follows_the_coarsest_dtype(engine, compute, more, expected):
    assert limit(engine, compute, **more) == expected
    assert limit(engine, compute, **more, **{"rollout.max_logprob_diff": "auto"}) == expected


@pytest.mark.parametrize("asked", [0.25, 2, "1e-4", None])
def test_a_number_or_null_is_taken_as_it_is(asked):
    allowed = limit("bfloat16", "bfloat16", **{"rollout.max_logprob_diff": asked})
    assert allowed == (None if asked is None else float(asked))


@pytest.mark.parametrize("asked", [0, -1, "off", "by dtype"])
def test_anything_else_is_refused(asked):
    with pytest.raises(ConfigError, match=r"max_logprob_diff.*must be a number above 0, or auto"):
        limit(**{"rollout.max_logprob_diff": asked})


def check_of(settled, more=None):
    roles = settled(more).actor_rollout_ref
    return MismatchCheck(roles.rollout, roles.actor.fsdp_config)


def compared(settled, engine, trainer, more=None):
    return check_of(settled, more).compare(torch.tensor(engine), torch.tensor(trainer), 7)


def test_differences_are_given_in_nats_and_in_probability(settled):
    metrics = compared(
        settled, [math.log(0.5), math.log(0.25)], [math.log(0.25), math.log(0.25)], {f"{AR}.rollout.max_logprob_diff": 1.0}
    )
    assert metrics == pytest.approx(
        {
            "rollout/logprob_diff_mean": math.log(2) / 2,
            "rollout/logprob_diff_max": math.log(2),
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_mean": 0.125,
            "training/rollout_probs_diff_max": 0.25,
            "training/rollout_probs_diff_std": 0.25 / math.sqrt(2),  # of 0.25 and 0, unbiased
        }
    )


def test_the_correlation_of_probabilities_is_pearsons(settled):
    more = {f"{AR}.rollout.max_logprob_diff": None}
    name = "training/rollout_actor_probs_pearson_corr"
    assert compared(settled, [-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0], more)[name] == pytest.approx(1.0)
    halves = [[math.log(p) for p in probs] for probs in ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1])]
    assert compared(settled, *halves, more)[name] == pytest.approx(-1.0)
    assert name not in compared(settled, [-1.0, -1.0], [-1.0, -2.0], more)


@pytest.mark.parametrize("engine", [[-1.0, -1.5], [math.nan, -1.0]])
def test_past_the_threshold_the_run_stops_and_names_the_key_and_the_step(settled, engine):
    more = {f"{AR}.rollout.max_logprob_diff": 0.2}
    with pytest.raises(
        RolloutError, match=rf"{AR}\.rollout\.max_logprob_diff=0\.2: in step 7 .* (0\.25|nan) nats.*rollout\.dtype"
    ):
        compared(settled, engine, [-1.0, -1.0], more)


@pytest.mark.parametrize(
    "more",
    [{"max_logprob_diff": None}, {"max_logprob_diff": 0.26}, {"max_logprob_diff": 0.2, "repetition_penalty": 1.1}],
    ids=str,
)
def test_below_the_threshold_without_one_or_with_a_penalty_the_run_goes_on(settled, more):
    metrics = compared(settled, [-1.0, -1.5], [-1.0, -1.0], {f"{AR}.rollout.{name}": value for name, value in more.items()})
    assert metrics["rollout/logprob_diff_mean"] == 0.25


@pytest.mark.parametrize("engine", [[-1.0, -1.0], [math.nan, -1.0]])
@pytest.mark.parametrize("trainer", [math.nan, -math.inf])
def test_where_the_trainers_own_log_probs_are_not_finite_the_sync_is_not_blamed(settled, engine, trainer):
    metrics = compared(settled, engine, [trainer, -1.0], {f"{AR}.rollout.max_logprob_diff": 0.2})
    assert not math.isfinite(metrics["rollout/logprob_diff_mean"])


def test_a_difference_of_the_threshold_goes_on_and_any_more_stops_by_default_that_of_the_dtypes(settled):
    key, log_probs = f"{AR}.rollout.max_logprob_diff", ([-1.0, -1.5], [-1.0, -1.0])
    assert compared(settled, *log_probs, {key: 0.25})["rollout/logprob_diff_mean"] == 0.25
    with pytest.raises(RolloutError, match="max_logprob_diff"):
        compared(settled, *log_probs, {key: math.nextafter(0.25, 0)})
    assert compared(settled, [-1.0, -1.0005], [-1.0, -1.0])["rollout/logprob_diff_mean"] < 1e-3
    with pytest.raises(RolloutError, match=r"max_logprob_diff=auto \(0\.001 for these dtypes\): in step 7 .* 0\.002 nats"):
        compared(settled, [-1.0, -1.004], [-1.0, -1.0])


def test_nothing_is_compared_without_engine_log_probs_or_without_tokens(settled):
    assert check_of(settled).compare(None, torch.full((3,), -5.0), 1) == {}
    assert compared(settled, [], []) == {}


def test_a_first_rollout_beyond_rounding_names_what_is_special_in_the_model(settled, caplog):
    roles = settled({f"{AR}.rollout.dtype": "fp32", f"{AR}.actor.fsdp_config.dtype": "fp32"}).actor_rollout_ref
    check = MismatchCheck(roles.rollout, roles.actor.fsdp_config, ("attn_logit_softcapping=50.0",))
    engine, near, far = torch.full((4,), -1.0), torch.full((4,), -1.00001), torch.full((4,), -1.0005)
    check.compare(engine, near, 1)
    check.compare(engine, far, 2)  # later steps have the limit alone
    assert not caplog.messages
    replace(check, compared=[]).compare(engine, far, 1)
    (warning,) = caplog.messages
    assert "0.0005 nats" in warning
    assert "attn_logit_softcapping=50.0" in warning
    with pytest.raises(RolloutError, match=r"attn_logit_softcapping=50\.0"):
        check.compare(engine, engine - 0.3, 3)


@pytest.mark.parametrize(
    ("more", "same"),
    [
        ({}, True),
        ({"temperature": 0.7}, True),
        ({"top_p": 0.9}, True),
        ({"top_k": 5}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"do_sample": False}, False),
        ({"logprobs_mode": "raw_logprobs"}, True),
        ({"logprobs_mode": "raw_logprobs", "top_p": 0.9}, True),
        ({"logprobs_mode": "raw_logprobs", "temperature": 0.7}, False),
    ],
    ids=str,
)
def test_engine_and_trainer_are_comparable_where_they_describe_one_distribution(settled, more, same):
    settings = settled({f"{AR}.rollout.{name}": value for name, value in more.items()})
    assert same_distribution(settings.actor_rollout_ref.rollout) is same
