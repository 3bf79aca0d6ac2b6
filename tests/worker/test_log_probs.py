import pytest
import torch

from tests.worker.test_build_policy import built
from tests.worker.test_policy import CPU, batch
from verl_memopt.algorithms.records import STATISTICS
from verl_memopt.config.schema import Rollout
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.worker.policy import compute_log_probs

HEAT = 0.7
SQUARES = {"sum_pi_squared": STATISTICS["sum_pi_squared"].function}


@pytest.fixture
def model(tiny_folder, one_rank):
    return built(tiny_folder, one_rank)


@torch.no_grad()
def naive(folder, whole):
    """Gives log-probs, entropies, sums of squared probabilities and largest ones [R] from whole logits, in transformers."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder).eval()
    parts = []
    for prompt, response in zip(whole.prompts.rows(), whole.responses.rows(), strict=True):
        logits = lm(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / HEAT
        log_p = logits.log_softmax(-1)[: len(response)]
        p = log_p.exp()
        parts.append((log_p.gather(-1, response[:, None])[:, 0], -(p * log_p).sum(-1), p.square().sum(-1), p.amax(-1)))
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def test_scores_are_those_of_whole_logits(model, tiny_folder):
    whole = batch(rows=6)
    found = compute_log_probs(model, whole, [[0, 3], [5, 1], [2, 4]], HEAT, True, CPU)
    log_probs, entropy, *_ = naive(tiny_folder, whole)
    torch.testing.assert_close(found.log_probs, log_probs, rtol=0, atol=2e-6)
    torch.testing.assert_close(found.entropy, entropy, rtol=0, atol=4e-6)
    assert (found.log_probs.dtype, found.log_probs.requires_grad) == (torch.float32, False)


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-6), ("bfloat16", 1e-3)])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_sums_of_squared_probabilities_are_those_of_whole_logits(tiny_folder, one_rank, with_entropy, dtype, tolerance):
    whole, model = batch(rows=6), built(tiny_folder, one_rank, dtype)
    _, _, squares, _ = naive(tiny_folder, whole)
    for cut in ([range(6)], [[0, 3], [5, 1], [2, 4]]):
        found = compute_log_probs(model, whole, cut, HEAT, with_entropy, CPU, SQUARES)
        torch.testing.assert_close(found.statistics["sum_pi_squared"], squares, rtol=0, atol=tolerance)
        assert found.statistics["sum_pi_squared"].dtype == torch.float32
        assert (found.entropy is not None) == with_entropy
    assert compute_log_probs(model, whole, [range(6)], HEAT, with_entropy, CPU).statistics == {}


def test_a_function_of_the_users_own_is_a_statistic(model, tiny_folder, tmp_path):
    (tmp_path / "mine.py").write_text("def largest(log_probs):\n    return log_probs.exp().amax(-1)\n")
    asked = SQUARES | {"largest": f"{tmp_path}/mine.py:largest"}
    whole = batch(rows=6)
    found = compute_log_probs(model, whole, [[0, 3], [5, 1], [2, 4]], HEAT, False, CPU, asked)
    _, _, squares, largest = naive(tiny_folder, whole)
    torch.testing.assert_close(found.statistics["largest"], largest, rtol=0, atol=2e-6)
    torch.testing.assert_close(found.statistics["sum_pi_squared"], squares, rtol=0, atol=2e-6)


def test_how_rows_are_cut_does_not_show(model):
    whole = batch(rows=6)
    one, many = (compute_log_probs(model, whole, rows, HEAT, False, CPU) for rows in ([range(6)], [[4], [], [2, 0], [1, 5], [3]]))
    torch.testing.assert_close(one.log_probs, many.log_probs, rtol=0, atol=2e-6)
    assert one.entropy is None


def test_rows_without_a_response_have_nothing_to_score(model):
    none = Ragged.from_rows([[], []], torch.int64)
    empty = RolloutBatch(
        prompts=Ragged.from_rows([[5, 6], [7]], torch.int64), responses=none, group=torch.zeros(2), batch_size=[]
    )
    found = compute_log_probs(model, empty, [[0], [1]], HEAT, True, CPU)
    assert found.log_probs.shape == found.entropy.shape == (0,)


def test_log_probs_are_those_of_the_distribution_that_rollouts_draw_from():
    assert Rollout(temperature=0.5).scoring_temperature == 0.5
    assert Rollout(temperature=0.5, do_sample=False).scoring_temperature == 1.0
