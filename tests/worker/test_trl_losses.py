"""TRL's losses under TRL's names: loss and gradient are those of TRL 1.16 itself, however a mini-batch is cut.

Expected are the loss and the norm of its gradient that ``GRPOTrainer._compute_loss`` gives for these tensors, padded, with the
names of a case as ``args`` and the rest at TRL's defaults, one process, no accumulation and ``max_completion_length`` 6. The
importance weights are those of ``_generate_and_score_completions``.
"""

import pytest
import torch

from tests.config.conftest import LEAST
from verl_memopt.algorithms.estimators import has_high_entropy
from verl_memopt.algorithms.rollout_correction import correct
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.trainer.micro_batching import with_selection
from verl_memopt.worker.policy import Objective
from verl_memopt.worker.trained_model import micro_batch

LENGTHS, ADVANTAGES = [3, 1, 5, 2], [1.0, -0.5, 2.0, -1.5]
NUM_TOKENS = sum(LENGTHS)
VLLM, LEVEL, BIAS = {"use_vllm": True}, "importance_sampling_level", "use_bias_correction_kl"
MODE, MOST, LEAST_WEIGHT = (f"vllm_importance_sampling_{name}" for name in ("mode", "clip_max", "clip_min"))
SEQUENCE = {LEVEL: "sequence"}
CASES = {
    "grpo": ({"loss_type": "grpo"}, -0.09944023934961377, 0.412738382325),
    "dapo": ({"loss_type": "dapo"}, -0.78136980721743, 0.375101036665),
    "bnpo": ({"loss_type": "bnpo"}, -0.78136980721743, 0.375101036665),
    "dr_grpo": ({"loss_type": "dr_grpo"}, -0.3581278283079887, 0.171921308471),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, 0.02488835741047439, 0.550950862804),
    "cispo with TRL's clip": ({"loss_type": "cispo"}, 0.07253451750547414, 0.09577867048),
    "sapo": ({"loss_type": "sapo", "sapo_temperature_pos": 1.5}, -0.0989269719514354, 0.442382974099),
    "luspo": ({"loss_type": "luspo", **SEQUENCE}, -2.415540183241679, 0.778046475695),
    "luspo by token": ({"loss_type": "luspo"}, -2.148766969847933, 1.031527850828),
    "vespo": ({"loss_type": "vespo"}, -0.05514019484901624, 0.27564337855),
    "vespo, other powers": (
        {"loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_neg": 1.0}, -0.22505583931495687, 0.542985865972
    ),
    "vespo with weights": (
        {"loss_type": "vespo", **VLLM, MODE: "token_truncate", MOST: 1.1}, -0.1314531773738311, 0.263975104102
    ),
    "vespo with masked weights": (
        {"loss_type": "vespo", **VLLM, MODE: "token_mask", MOST: 1.3, LEAST_WEIGHT: 0.8}, -0.04044826268030819, 0.244690515984
    ),
    "gspo": ({"loss_type": "grpo", **SEQUENCE, "epsilon": 0.05}, -0.07703265794268338, 0.388533941919),
    "gspo of all tokens": ({"loss_type": "dapo", **SEQUENCE}, -0.8783782484515197, 0.282925991162),
    "delta": ({"loss_type": "grpo", "delta": 1.3, "epsilon": 0.1}, -0.08411984035979914, 0.298577639282),
    "kl": ({"loss_type": "grpo", "beta": 0.3, BIAS: False}, -0.05749229164620373, 0.424179716052),
    "kl by ratio": ({"loss_type": "grpo", "beta": 0.3, BIAS: True}, -0.044701960133744056, 0.43371478525),
    "kl by the ratio of a sequence": (
        {"loss_type": "grpo", "beta": 0.3, BIAS: True, **SEQUENCE}, -0.10593020175161227, 0.409595821646
    ),
    "off-policy mask": (
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.05, "beta": 0.2, BIAS: True}, -0.7304050319997369, 0.389515524204
    ),
    "off-policy mask of the engine": (
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.05, **VLLM, MODE: "token_truncate"},
        -0.6649594867892126, 0.373588214425,
    ),
    "top entropy": ({"loss_type": "dapo", "top_entropy_quantile": 0.4}, -0.2810756275851752, 0.328081248548),
    "entropy bonus": ({"loss_type": "grpo", "entropy_coef": 0.1}, -0.19841375308287074, 0.412738382325),
    "sequence mask": ({"loss_type": "dapo", **VLLM, MOST: 1.1}, -0.8740416678741205, 0.199177426153),
    "token truncate": (
        {"loss_type": "dapo", **VLLM, MODE: "token_truncate", MOST: 1.05}, -0.7029828932567509, 0.355216314852
    ),
    "token mask": (
        {"loss_type": "grpo", **VLLM, MODE: "token_mask", MOST: 1.2, LEAST_WEIGHT: 0.9}, -0.08073229303724103, 0.260556560932
    ),
    "sequence truncate": (
        {"loss_type": "grpo", **VLLM, MODE: "sequence_truncate", MOST: 1.02}, 0.10096753076545295, 0.404256320313
    ),
}  # fmt: skip
"""Names of TRL, the loss, and the norm of the gradient of the log-probs."""


def tensors():
    """Gives log-probs of policy, old policy, reference and engine, and entropies."""
    generator = torch.Generator().manual_seed(11)
    old = -2 * torch.rand(NUM_TOKENS, generator=generator, dtype=torch.float64)
    new, ref, engine = (
        old + scale * torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64) for scale in (0.4, 0.3, 0.2)
    )
    entropy = 2 * torch.rand(NUM_TOKENS, generator=generator, dtype=torch.float64).float().double()
    return new, old, ref, engine, entropy


def settings_of(names):
    trl = {"delta": None, "epsilon": 0.2, "max_completion_length": 6, "use_vllm": False} | names
    if trl["use_vllm"]:
        trl = {"vllm_importance_sampling_correction": True} | trl
    least = {key: value for key, value in LEAST.items() if key != "actor_rollout_ref.rollout.name"}
    return settings_from_mapping(least | {"algorithm.adv_estimator": "grpo"} | trl)


def batch_of(settings, engine_counts):
    new, old, ref, engine, entropy = tensors()
    row = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    advantages, weights = torch.tensor(ADVANTAGES, dtype=torch.float64)[row], None
    correction = settings.algorithm.rollout_correction
    if correction.rollout_is is not None:
        weights = correct(old, engine, row, torch.tensor(LENGTHS), correction).weights.double()
    if settings.algorithm.top_entropy_quantile < 1:
        chosen = has_high_entropy(entropy, None, settings.algorithm.top_entropy_quantile)
        advantages = advantages.where(chosen, 0.0)
    batch = RolloutBatch(
        prompts=Ragged.from_rows([[1]] * 4, torch.int64),
        responses=Ragged.from_rows([[1] * length for length in LENGTHS], torch.int64),
        group=torch.arange(4),
        old_log_probs=old,
        ref_log_probs=ref,
        rollout_log_probs=engine if engine_counts else None,
        advantages=advantages,
        weights=weights,
        batch_size=[],
    )
    return with_selection(batch, range(4), settings.actor_rollout_ref.actor, 0), new.requires_grad_(), entropy.requires_grad_()


COUNTS = GlobalCounts(NUM_TOKENS, 4)


@pytest.mark.parametrize("cut", [[[0, 1, 2, 3]], [[2], [3, 0], [1]]], ids=["whole", "cut"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_trl_however_the_mini_batch_is_cut(case, cut):
    names, expected_loss, expected_norm = CASES[case]
    settings = settings_of(names)
    actor = settings.actor_rollout_ref.actor
    batch, new, entropy = batch_of(settings, "use_vllm" in names)
    total = 0.0
    for rows in cut:
        tokens = torch.cat([torch.arange(NUM_TOKENS).split(LENGTHS)[row] for row in rows])
        objective = Objective(micro_batch(batch, rows), COUNTS, actor)
        total = total + objective.loss(new[tokens], entropy[tokens] if objective.with_entropy else None)[0]
    total.backward()
    # Importance weights are fp32.
    assert total.item() == pytest.approx(expected_loss, abs=2e-7 if "use_vllm" in names or "sapo" in case else 1e-9)
    assert new.grad.norm().item() == pytest.approx(expected_norm, rel=2e-7)
    if objective.with_entropy:
        assert entropy.grad.tolist() == pytest.approx([-0.1 / NUM_TOKENS] * NUM_TOKENS)


@pytest.mark.parametrize("on_policy", [False, True], ids=["off-policy", "on-policy"])
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_that_the_head_computes_for_some_tokens_is_that_of_the_whole_loss(case, on_policy):
    settings = settings_of(CASES[case][0])
    batch, new, entropy = batch_of(settings, engine_counts=False)
    batch.old_log_probs = None if on_policy else batch.old_log_probs
    objective = Objective(micro_batch(batch, range(4)), COUNTS, settings.actor_rollout_ref.actor)
    ahead = objective.token_gradient(3.0)
    if ahead is None:
        return
    objective.loss(new, entropy if objective.with_entropy else None)[0].backward()
    for rows in (slice(0, 4), slice(4, NUM_TOKENS)):
        found, of_entropy = ahead(rows, new.detach()[rows], entropy.detach()[rows] if objective.with_entropy else None)
        torch.testing.assert_close(found, 3 * new.grad[rows], rtol=1e-10, atol=1e-12)
        if of_entropy is not None:
            torch.testing.assert_close(of_entropy, 3 * entropy.grad[rows])
