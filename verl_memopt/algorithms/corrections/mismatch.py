"""How far the trainer's probabilities are from the rollout engine's: divergences and perplexities."""

from __future__ import annotations

from torch import Tensor

from verl_memopt.algorithms.kl import MAX_LOG_RATIO
from verl_memopt.algorithms.reductions import row_means, row_sums


def mismatch_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, row: Tensor, lengths: Tensor) -> dict[str, float]:
    """Return the metrics of ``compute_offpolicy_metrics`` in verl, without the prefix ``rollout_corr/``. None without tokens.

    ``kl`` and ``k3_kl`` estimate KL(engine || trainer) per token. Perplexities are means over rows of exp(-mean log-prob).
    ``chi2_token`` and ``chi2_seq`` are mean r^2 - 1 over tokens and rows, with r = trainer / engine.

    Args:
        old_log_probs: fp32 [R], of the trainer.
        rollout_log_probs: fp32 [R], of the engine.
        row: int64 [R].
        lengths: int64 [rows]. Rows without tokens do not count.
    """
    if not row.numel():
        return {}
    filled = lengths > 0
    trainer, engine = old_log_probs.detach().double(), rollout_log_probs.detach().double()
    log_ratio = trainer - engine
    token_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    row_ratio = row_sums(log_ratio, row, lengths.shape[0])[filled].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    trainer_mean, engine_mean = (row_means(values, row, lengths)[filled] for values in (trainer, engine))
    difference = engine_mean - trainer_mean
    metrics = {
        "training_ppl": (-trainer_mean).exp().mean(),
        "training_log_ppl": -trainer_mean.mean(),
        "rollout_ppl": (-engine_mean).exp().mean(),
        "rollout_log_ppl": -engine_mean.mean(),
        "kl": -log_ratio.mean(),
        "k3_kl": (token_ratio.exp() - token_ratio - 1).mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": (2 * token_ratio).exp().mean() - 1,
        "chi2_seq": (2 * row_ratio).exp().mean() - 1,
    }
    return {name: float(value) for name, value in metrics.items()}
