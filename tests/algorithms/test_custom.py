"""A user's own estimators and losses: what they get, what becomes of their results, and what is said about their mistakes."""

import re

import pytest
import torch

from tests.algorithms.ragged import Ragged
from verl_memopt.algorithms.custom import check_custom, custom_advantages, inputs_of, load_statistic, statistics_of
from verl_memopt.algorithms.estimators import AdvantageInputs, estimate, grpo_advantages
from verl_memopt.algorithms.kl import token_level_rewards
from verl_memopt.algorithms.losses import LossTokens, policy_loss
from verl_memopt.algorithms.records import STATISTICS
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import Settings
from verl_memopt.errors import UserError

SAMPLE = Ragged((3, 1, 4, 2), 7)
LOSS = "actor_rollout_ref.actor.policy_loss"


def settings(folder, kind, text, name="mine", file="mine.py", **more):
    """Gives the settings of a user's estimator or loss, whose file holds a text."""
    (folder / "mine.py").write_text(text)
    choice, section = {
        "estimator": ("algorithm.adv_estimator", "algorithm.custom_estimator"),
        "loss": (f"{LOSS}.loss_mode", f"{LOSS}.custom"),
    }[kind]
    chosen = {choice: "custom", f"{section}.path": str(folder / file), f"{section}.name": name, "actor_rollout_ref.rollout.n": 4}
    clips = {f"actor_rollout_ref.actor.clip_ratio_{side}": 0.2 for side in ("low", "high")}
    return replaced(Settings(), clips | chosen | more)


VERLS_GRPO = """
import numpy as np
import torch

def mine(token_level_rewards, response_mask, index, epsilon=1e-6, norm_adv_by_std_in_grpo=True, config=None):
    assert config.norm_adv_by_std_in_grpo and response_mask.dtype == torch.int64 and isinstance(index, np.ndarray)
    scores = token_level_rewards.sum(dim=-1)
    groups = {prompt: scores[index == prompt] for prompt in np.unique(index)}
    result = torch.stack([(s - groups[i].mean()) / (groups[i].std() + epsilon) for s, i in zip(scores, index)])
    result = result.unsqueeze(-1) * response_mask
    return result, result
"""


def inputs(rewards=(1.0, 0.0, 0.5, 2.0), valid=(True, True, True, True), **more):
    scores = torch.tensor(rewards)
    return AdvantageInputs(
        scores, torch.tensor([0, 0, 1, 1]), torch.tensor(valid), SAMPLE.row, SAMPLE.lengths,
        token_rewards=token_level_rewards(scores, SAMPLE.row, SAMPLE.lengths), **more,
    )  # fmt: skip


def test_an_estimator_of_verl_runs_as_it_is(tmp_path):
    chosen = settings(tmp_path, "estimator", VERLS_GRPO)
    check_custom(chosen)
    given = inputs()
    expected = grpo_advantages(given.rewards, given.group, given.valid)[SAMPLE.row]
    for result in custom_advantages(given, chosen.algorithm):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def test_rows_without_a_reward_are_left_out_of_the_call_and_get_zero(tmp_path):
    text = "def mine(token_level_rewards, response_mask, **rest):\n    assert not token_level_rewards.isnan().any()\n"
    text += "    return token_level_rewards + 1.0, token_level_rewards\n"
    chosen = settings(tmp_path, "estimator", text)
    nan = float("nan")
    advantages, returns = custom_advantages(inputs((1.0, nan, 0.5, nan), (True, False, True, False)), chosen.algorithm)
    assert advantages.tolist() == [1, 1, 2, 0, 1, 1, 1, 1.5, 0, 0]
    assert returns.tolist() == [0, 0, 1, 0, 0, 0, 0, 0.5, 0, 0]
    nothing = custom_advantages(inputs((nan,) * 4, (False,) * 4), chosen.algorithm)
    assert torch.equal(torch.stack(nothing), torch.zeros(2, 10))


def test_an_input_is_asked_for_by_its_name(tmp_path):
    text = "def mine(token_level_rewards, response_mask, old_log_probs, ref_log_probs=None):\n"
    text += "    return old_log_probs * response_mask, token_level_rewards\n"
    kl = {"actor_rollout_ref.actor.use_kl_loss": True}
    chosen = settings(tmp_path, "estimator", text, **kl)
    check_custom(chosen)
    assert inputs_of(chosen.algorithm) == ("old_log_probs", "ref_log_probs")
    assert statistics_of(chosen.algorithm) == {}
    old = torch.linspace(-2, -1, 10)
    assert torch.equal(custom_advantages(inputs(old_log_probs=old, ref_log_probs=old), chosen.algorithm)[0], old)


def test_a_statistic_of_the_package_is_asked_for_by_its_name(tmp_path):
    text = "def mine(token_level_rewards, response_mask, sum_pi_squared):\n    return sum_pi_squared, token_level_rewards\n"
    chosen = settings(tmp_path, "estimator", text, **{"actor_rollout_ref.actor.calculate_sum_pi_squared": True})
    check_custom(chosen)
    assert statistics_of(chosen.algorithm) == {"sum_pi_squared": STATISTICS["sum_pi_squared"].function}
    found = {"sum_pi_squared": torch.linspace(0.1, 1, 10)}
    assert torch.equal(custom_advantages(inputs(statistics=found), chosen.algorithm)[0], found["sum_pi_squared"])


def test_an_input_of_its_own_is_a_function_beside_it(tmp_path):
    text = "def mine(token_level_rewards, response_mask, surprise):\n    return surprise * response_mask, token_level_rewards\n"
    text += "def surprise(log_probs):\n    return -log_probs.amax(-1)\n"
    chosen = settings(tmp_path, "estimator", text)
    check_custom(chosen)
    assert statistics_of(chosen.algorithm) == {"surprise": f"{tmp_path}/mine.py:surprise"}
    log_probs = torch.linspace(0, 3, 40).view(10, 4).log_softmax(-1)
    found = {"surprise": load_statistic(f"{tmp_path}/mine.py:surprise").compute(log_probs, None)}
    assert torch.equal(custom_advantages(inputs(statistics=found), chosen.algorithm)[0], -log_probs.amax(-1))


@pytest.mark.parametrize("kept", [None, torch.tensor([True, True, False, True, True, True, True, False, True, True])])
def test_a_loss_is_aggregated_weighted_and_masked_as_the_packages_own(tmp_path, kept):
    text = """
import torch

def mine(log_prob, old_log_prob, advantages, response_mask, config):
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    return torch.maximum(-advantages * ratio, -advantages * clipped)
"""
    chosen = settings(tmp_path, "loss", text)
    check_custom(chosen)
    old, advantages = -torch.linspace(0.1, 2.0, 10), SAMPLE.tokens(1).float()
    results = []
    for mode in ("custom", "vanilla"):
        actor = replaced(chosen, {f"{LOSS}.loss_mode": mode, "actor_rollout_ref.actor.clip_ratio_c": 1e9}).actor_rollout_ref.actor
        new = (old + torch.linspace(-0.5, 0.5, 10)).requires_grad_()
        weights, counts = torch.linspace(0.5, 1.5, 10), GlobalCounts(10.0, 4.0)
        loss, _ = policy_loss(LossTokens(new, old, advantages, SAMPLE.row, SAMPLE.lengths, counts, weights, kept), actor)
        loss.backward()
        results.append((loss.detach(), new.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-8)


def test_a_loss_gets_which_of_its_tokens_count(tmp_path):
    text = "import torch\ndef mine(log_prob, old_log_prob, response_mask):\n    assert response_mask.dtype == torch.bool\n"
    text += "    return log_prob * response_mask.sum()\n"
    actor = settings(tmp_path, "loss", text).actor_rollout_ref.actor
    log_probs = -torch.linspace(0.1, 2.0, 10)
    for kept in (None, SAMPLE.tokens(1) > SAMPLE.tokens(1).median()):
        tokens = LossTokens(log_probs, log_probs, log_probs, SAMPLE.row, SAMPLE.lengths, GlobalCounts(10.0, 4.0), None, kept)
        loss, metrics = policy_loss(tokens, actor)
        counted = log_probs if kept is None else log_probs[kept]
        assert loss.item() == pytest.approx(len(counted) * counted.sum().item() / 10, rel=1e-6)
        assert metrics["ratio_clamped"].item() == 0


def test_a_loss_that_fails_in_a_step_is_named_by_its_key_and_its_file(tmp_path):
    actor = settings(tmp_path, "loss", "def mine(log_prob): return None").actor_rollout_ref.actor
    log_probs = -torch.linspace(0.1, 2.0, 10)
    with pytest.raises(UserError, match=rf"^{LOSS}\.custom\.name=mine in {tmp_path}/mine\.py: the loss must be a tensor"):
        policy_loss(LossTokens(log_probs, log_probs, log_probs, SAMPLE.row, SAMPLE.lengths, GlobalCounts(10.0, 4.0)), actor)


def test_the_estimator_of_the_settings_is_the_users(tmp_path):
    text = "def mine(token_level_rewards, response_mask):\n    return token_level_rewards + 1.0, token_level_rewards\n"
    algorithm = settings(tmp_path, "estimator", text).algorithm
    assert torch.equal(torch.stack(estimate(inputs(), algorithm)), torch.stack(custom_advantages(inputs(), algorithm)))


def test_a_statistic_of_the_package_is_loaded_by_its_dotted_name():
    (known,) = STATISTICS.values()
    log_probs = torch.linspace(0, 3, 40).view(10, 4).log_softmax(-1)
    found = load_statistic(known.function).compute(log_probs, None)
    torch.testing.assert_close(found, log_probs.exp().square().sum(-1))


def test_a_statistic_of_a_file_that_is_not_there_is_refused_under_its_key(tmp_path):
    with pytest.raises(UserError, match=r"algorithm\.custom_estimator\.path=.*there is no such file"):
        load_statistic(f"{tmp_path}/nothing.py:surprise")


def test_whoever_takes_any_argument_gets_those_of_verl(tmp_path):
    text = "def mine(token_level_rewards, **rest):\n    assert list(rest) == ['response_mask', 'index', 'config']\n"
    chosen = settings(tmp_path, "estimator", f"{text}    return token_level_rewards, token_level_rewards\n")
    assert inputs_of(chosen.algorithm) == ()
    check_custom(chosen)


def test_an_estimator_is_tried_on_a_group_with_rewards_of_0_and_1_and_on_one_with_equal_rewards(tmp_path):
    text = f"""
import torch

def mine(token_level_rewards, response_mask, index, old_log_probs, rollout_is_weights, surprise):
    seen = (token_level_rewards, response_mask, torch.tensor(index), old_log_probs, rollout_is_weights)
    torch.save(seen, {str(tmp_path / "seen.pt")!r})
    return surprise, token_level_rewards

def surprise(log_probs):
    torch.save(log_probs, {str(tmp_path / "head.pt")!r})
    return log_probs[:, 0]
"""
    check_custom(settings(tmp_path, "estimator", text, **{"algorithm.rollout_correction.rollout_is": "token"}))
    rewards, mask, index, old, weights = torch.load(tmp_path / "seen.pt")
    assert mask.sum(1).tolist() == [1, 2, 3, 1, 2, 3, 1, 2]  # two prompts with four responses each
    assert index.tolist() == [0] * 4 + [1] * 4
    assert rewards.tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert torch.equal(old, -0.5 * mask)
    assert torch.equal(weights, 0.5 * mask)
    head = torch.load(tmp_path / "head.pt")
    torch.testing.assert_close(head, torch.tensor([0, 0.25, 0.5, 0.75, 1]).log_softmax(0).expand(15, 5))


def test_a_loss_is_tried_twice_on_ratios_and_advantages_of_both_signs_and_then_on_a_part_of_them(tmp_path):
    text = f"""
import os
import torch

def mine(log_prob, old_log_prob, advantages, response_mask):
    name = f"{tmp_path}/{{len(os.listdir({str(tmp_path)!r}))}}.pt"
    torch.save((log_prob.detach(), old_log_prob, advantages, response_mask), name)
    return -advantages * (log_prob - old_log_prob).exp()
"""
    chosen = settings(tmp_path, "loss", text)
    check_custom(chosen)
    whole, again, part = (torch.load(path) for path in sorted(tmp_path.glob("*.pt")))
    assert all(map(torch.equal, whole, again))
    new, old, advantages, mask = whole
    torch.testing.assert_close(old, -torch.linspace(0.1, 3.0, 12))
    torch.testing.assert_close(new - old, torch.linspace(-0.4, 0.4, 12))
    torch.testing.assert_close(advantages, torch.linspace(1.0, -1.0, 12))
    assert torch.equal(mask, torch.ones(12, dtype=torch.bool))
    for all_of, some in zip(whole, part, strict=True):
        assert torch.equal(all_of[3:7], some)


def test_an_input_that_a_step_lacks_is_named_with_its_setting(tmp_path):
    text = "def mine(token_level_rewards, response_mask, ref_log_probs):\n    return token_level_rewards, token_level_rewards\n"
    algorithm = settings(tmp_path, "estimator", text, **{"actor_rollout_ref.actor.use_kl_loss": True}).algorithm
    with pytest.raises(UserError, match=r"this run does not compute ref_log_probs\. Set .*use_kl_loss=true"):
        custom_advantages(inputs(), algorithm)


E, L = "estimator", "loss"
ESTIMATOR = "def mine(token_level_rewards, response_mask, index, config):\n    "
A_STATISTIC = "def mine(token_level_rewards, surprise):\n    return surprise, token_level_rewards\n"
A_STATISTIC += "def surprise(log_probs):\n    "
A_LOSS = "def mine(log_prob, old_log_prob, advantages):\n    "
MISTAKES = {
    "no such file": (E, "", {"file": "other.py"}, "there is no such file. Set the path"),
    "no such name": (E, "def other(): ...", {}, "the file has no 'mine'. It defines other. Name one of these in algorithm.cus"),
    "no function": (L, "mine = 3", {}, "it is a int, not a function. Name a function"),
    "an unknown argument": (E, "def mine(token_level_rewards, magic): ...", {}, "it asks for magic, .*Use these names"),
    "an argument that cannot be named": (E, "def mine(magic, /, index, more): ...", {}, "it asks for magic, more, .*Use these"),
    "an unknown argument of an object": (
        E, "class Mine:\n    def __call__(self, magic): ...\nmine = Mine()", {}, "it asks for magic, .*Use these names",
    ),
    "a statistic in a loss": (
        L, "def mine(log_prob, surprise): ...\ndef surprise(log_probs): ...", {}, "it asks for surprise, .*Use these names",
    ),
    "a constant for a statistic": (E, "surprise = 3\ndef mine(index, surprise): ...", {}, "it asks for surprise, .*Use these"),
    "an argument of another kind": (L, "def mine(log_prob, values): ...", {}, "it asks for values, .*Use these names"),
    "an input that the run lacks": (
        E, "def mine(token_level_rewards, ref_log_probs): ...", {}, "does not compute ref_log_probs. Set .*use_kl_loss=true",
    ),
    "a statistic without its pass": (
        E, f"{A_STATISTIC}return log_probs[:, 0]", {"algorithm.rollout_correction.bypass_mode": True},
        "does not compute surprise. Set .*bypass_mode=false",
    ),
    "a statistic of the package without its setting": (
        E, "def mine(token_level_rewards, sum_pi_squared): ...", {},
        "does not compute sum_pi_squared. Set actor_rollout_ref.actor.calculate_sum_pi_squared=true, without bypass mode",
    ),
    "a statistic of the package in bypass mode": (
        E, "def mine(token_level_rewards, sum_pi_squared): ...",
        {"actor_rollout_ref.actor.calculate_sum_pi_squared": True, "algorithm.rollout_correction.bypass_mode": True},
        "does not compute sum_pi_squared. Set .*calculate_sum_pi_squared=true",
    ),
    "a statistic of another shape": (
        E, f"{A_STATISTIC}return log_probs", {}, r"the statistic must be a tensor float32 \[15\], .* float32 \[15, 5\]",
    ),
    "an exception in a statistic": (
        E, f"{A_STATISTIC}return log_probs[99]", {}, r"raised IndexError: .*mine.py:4. It was given log_probs float32 \[15, 5\]",
    ),
    "an exception in an estimator": (
        E, f"{ESTIMATOR}return response_mask[99]", {},
        r"raised IndexError: .*mine.py:2. It was given token_level_rewards float32 \[8, 3\], .*Correct",
    ),
    "an exception in a loss": (
        L, f"{A_LOSS}raise ValueError('first\\nsecond')", {}, r"ValueError: first second .*log_prob float32 \[12\].*Correct",
    ),
    "a loss that writes to what it was given": (
        L, f"{A_LOSS}advantages.clamp_(-0.5, 0.5)\n    return -advantages * log_prob", {},
        "it changes advantages in place. Begin with advantages = advantages.clone()",
    ),
    "a statistic that writes to what it was given": (
        E, f"{A_STATISTIC}return log_probs.exp_()[:, 0]", {}, "it changes log_probs in place. Begin with log_probs = log",
    ),
    "a loss of chance": (
        L, f"import torch\n{A_LOSS}return log_prob * torch.rand(len(log_prob))", {},
        ": the loss of a token differs from call to call. Remove everything random from it.$",
    ),
    "three results": (
        E, f"{ESTIMATOR}return (token_level_rewards,) * 3", {}, r"must return \(advantages, returns\), .* a tuple of 3. Correct",
    ),
    "two unknown arguments": (
        E, "def mine(magic, token_level_rewards, more): ...", {},
        r"asks for magic, more, .* with token_level_rewards, response_mask, .*config, and may ask for old_log_probs, ref_",
    ),
    "an unknown argument of a loss": (
        L, "def mine(log_prob, old_log_probs): ...", {}, r"with log_prob, old_log_prob, .*config\. Use these names",
    ),
    "no pair": (E, f"{ESTIMATOR}return token_level_rewards", {}, "but it returned a Tensor. Correct"),
    "one advantage a row": (
        E, f"{ESTIMATOR}return token_level_rewards.sum(1), token_level_rewards", {},
        r"advantages must be a tensor float32 \[8, 3\], but it returned float32 \[8\]. Correct",
    ),
    "whole numbers": (
        E, f"{ESTIMATOR}return token_level_rewards, response_mask", {},
        r"returns must be a tensor float32 \[8, 3\], but it returned int64 \[8, 3\]. Correct",
    ),
    "an array": (
        E, f"{ESTIMATOR}return token_level_rewards.numpy(), token_level_rewards", {}, r"float32 \[8, 3\], .* ndarray",
    ),
    "advantages that are not finite": (
        E, f"{ESTIMATOR}return token_level_rewards / 0, token_level_rewards", {}, "hold nan at row 0, token 0. Correct",
    ),
    "a deviation of 0": (
        E, f"{ESTIMATOR}s = token_level_rewards.sum(1, keepdim=True)\n    a = s + response_mask * 0.0\n"
        "    for i in set(index):\n        a[index == i] = (a[index == i] - s[index == i].mean()) / s[index == i].std()\n"
        "    return a, a", {}, "advantages hold nan at row 4, token 0. Correct .* may all have the same reward",
    ),
    "a class": (L, "class mine:\n    def __call__(self, log_prob): ...", {}, "it is a class, not a function. Name a function"),
    "an exception in what a function calls": (
        L, f"import torch\n{A_LOSS}return 1 - torch.ones(1, dtype=torch.bool)", {}, r"RuntimeError: .* in \S*mine.py:3\. It was",
    ),
    "a mean": (
        L, f"{A_LOSS}return (-advantages * log_prob).mean()", {},
        r": the loss must be a tensor float32 \[12\], .* returned float32 \[\]",
    ),
    "a loss of whole numbers": (L, f"{A_LOSS}return (log_prob > old_log_prob).long()", {}, r"float32 \[12\], .* int64 \[12\]"),
    "no gradient": (L, f"{A_LOSS}return -advantages * log_prob.detach()", {}, "has no gradient. Compute it from log_prob"),
    "a gradient of something else": (
        L, f"import torch\n{A_LOSS}return -advantages * torch.ones(12, requires_grad=True)", {}, "has no gradient. Compute it",
    ),
    "a loss that is not finite": (
        L, f"{A_LOSS}return log_prob / (log_prob != log_prob.max())", {}, ": the loss is not finite: -inf. Correct",
    ),
    "a gradient that is not finite": (
        L, f"{A_LOSS}return (log_prob - log_prob.detach()).abs().sqrt()", {}, ": its gradient is not finite: nan. Correct",
    ),
    "a ratio of the whole sequence": (
        L, f"{A_LOSS}return -advantages * (log_prob - old_log_prob).mean().exp()", {},
        ": the loss of a token depends on the other tokens of the call. Compute it .* in an estimator.$",
    ),
    "a gradient of the whole sequence": (
        L, f"{A_LOSS}return log_prob + log_prob.sum() - log_prob.sum().detach()", {},
        ": the gradient of a token depends on the other tokens of the call. Compute it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_function_and_the_way_out(tmp_path, mistake):
    kind, text, more, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message) as error:
        check_custom(settings(tmp_path, kind, text, **more))
    assert str(error.value).count("\n") == 0
    assert re.match(r"algorithm\.custom_estimator|actor_rollout_ref\.actor\.policy_loss\.custom", str(error.value))
    assert "mine" in str(error.value) or more


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_an_error_in_a_package_outside_pythons_own_folder_is_named_at_the_users_line(folder, tmp_path, monkeypatch):
    library = tmp_path / folder / f"of_{folder[:4]}.py"
    library.parent.mkdir()
    library.write_text("def fails():\n    raise ValueError('inside')\n")
    monkeypatch.syspath_prepend(str(library.parent))
    chosen = settings(tmp_path, L, f"import {library.stem}\n{A_LOSS}return {library.stem}.fails()")
    with pytest.raises(UserError, match=r"ValueError: inside in \S*mine\.py:3\. It was"):
        check_custom(chosen)


@pytest.mark.parametrize("ends", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise GeneratorExit"])
@pytest.mark.parametrize("kind", ["estimator", "loss"])
def test_a_function_that_would_end_the_run_is_one_error_with_its_file(kind, ends, tmp_path):
    arguments = (
        "token_level_rewards, response_mask, index, config" if kind == "estimator" else "log_prob, old_log_prob, advantages"
    )
    chosen = settings(tmp_path, kind, f"def mine({arguments}, *, unused=None):\n    {ends}\n")
    with pytest.raises(UserError, match=r"mine\.py: it raised .*(SystemExit: 0|os\._exit\(0\)|GeneratorExit:) in .*mine\.py:2"):
        check_custom(chosen)
