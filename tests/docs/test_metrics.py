"""The page of metrics names everything that a run logs, and nothing that no run can log."""

import re

import pytest

from tests import rlt
from tests.docs.pages import DOCS
from tests.end_to_end.runs import metrics, steps_here
from tests.trainer.conftest import ready
from verl_memopt.model.tiny import TinyShape, make_tiny_model

PAGE = DOCS / "metrics.md"
AR = "actor_rollout_ref"
SHORT = [
    *("trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1", "data.train_batch_size=4"),
    *(f"{AR}.rollout.name=hf", "trainer.track_memory_every_steps=1", "data.val_max_samples=8"),
]
OFF_POLICY = [
    *(f"{AR}.actor.ppo_mini_batch_size=2", f"{AR}.actor.calculate_entropy=true", f"{AR}.actor.use_kl_loss=true"),
    *("algorithm.use_kl_in_reward=true", "data.truncation=left", f"{AR}.model.enable_activation_offload=true"),
    *(f"{AR}.rollout.val_kwargs.n=2", f"{AR}.rollout.val_kwargs.do_sample=true", f"{AR}.rollout.val_kwargs.temperature=1.0"),
    *("custom_reward_function.path={reward}", "algorithm.filter_groups.enable=true"),
    *(f"{AR}.actor.policy_loss.loss_mode=kl_cov", "algorithm.adv_estimator=remax", "algorithm.use_pf_ppo=true"),
    *(f"algorithm.rollout_correction.{setting}" for setting in ("rollout_is=token", "rollout_is_threshold=0.5_5.0")),
    *(f"algorithm.rollout_correction.{setting}" for setting in ("rollout_rs=token_k1", "rollout_rs_threshold=9")),
    *("algorithm.rollout_correction.rollout_is_batch_normalize=true", "algorithm.mask_truncated_responses=true"),
    *(f"{AR}.ref.sync_every_steps=1", f"{AR}.actor.adaptive_token_budget=true", f"{AR}.actor.entropy_ctrl.target=1.0"),
]
PPO = [
    *("algorithm.adv_estimator=gae", f"{AR}.actor.policy_loss.loss_mode=vanilla", "critic.ppo_max_token_len_per_gpu=4096"),
    *(f"{AR}.actor.ppo_mini_batch_size=4", "critic.model.enable_activation_offload=true"),
    "critic.model.activation_offload_min_bytes=64",
    *(f"{role}.fsdp_config.dtype=bfloat16" for role in (f"{AR}.actor", "critic.model")),
    *(f"{role}.fsdp_config.optimizer_offload=true" for role in (f"{AR}.actor", "critic.model")),
    f"{AR}.rollout.max_logprob_diff=null",
]
VESPO = f"{AR}.actor.policy_loss.loss_mode=vespo"
SFT = [
    *("algorithm.adv_estimator=sft", f"{AR}.actor.policy_loss.loss_mode=gpg", f"{AR}.rollout.n=1"),
    "data.response_key=extra_info.answer",
]
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    answer = solution_str.strip()
    return {"score": float(answer == ground_truth), "acc": float(answer == ground_truth), "pred": answer}
"""
GPU_ONLY = re.compile(r"(peak_reserved|device_used|max_memory_reserved)_gb$|^perf/compile")
NOT_HERE = {"timing_s/load_checkpoint", "memory/load_checkpoint", "timing_s/gen_waiting"}
"""Times that only a resumed run or one of several workers has."""
SEVERAL_WORKERS = re.compile(r"^global_seqlen/|mean_peak_allocated_gb$|^timing_s/(waiting_for|idle)_")


def expanded(name):
    """Return the names that a name with ``{a,b}`` stands for."""
    found = re.search(r"\{([^{}]*)\}", name)
    if found is None:
        return [name]
    return [each for choice in found[1].split(",") for each in expanded(name.replace(found[0], choice, 1))]


def documented():
    """Return the names in the first column of the page's tables."""
    rows = re.findall(r"^\| `([^`]+/[^`]+)` \|", PAGE.read_text(), re.MULTILINE)
    return [name for row in rows for name in expanded(row)]


def pattern(name):
    """Return what a documented name matches: a word in capitals stands for any text, SOURCE with slashes."""
    parts = {"REASON": "[a-z_]+", "SOURCE": ".+", "VARIABLE": r"[^/]+", "PHASE": r"[a-z_]+", "NAME": r"(token|seq_\w+?)_k[123]"}
    text = re.sub("REASON|SOURCE|VARIABLE|PHASE|NAME", lambda found: parts[found[0]], re.escape(name))
    return re.compile(re.sub(r"(?<=@)[NK]", r"\\d+", text))


TOOLS = """
def look(place: str) -> str:
    \"\"\"Look.

    Args:
        place: Where.
    \"\"\"
    return place

def calls(text):
    return [("look", {"place": "x"})]
"""
AGENT = (
    f"{AR}.rollout.agent.tools.path={{reward}}", f"{AR}.rollout.agent.tools.name=[look]", f"{AR}.rollout.agent.num_workers=1",
    f"{AR}.rollout.multi_turn.format={{reward}}:calls", f"{AR}.rollout.multi_turn.max_assistant_turns=2",
    f"{AR}.rollout.stop_token_ids={list(range(20, 120))}", "data.max_response_length=60",
)  # fmt: skip


@pytest.fixture(scope="module")
def logged(toy, tmp_path_factory):
    """Return every name of short runs: on-policy, all that adds metrics, a critic, supervised, distilled, RLT with int8."""
    folder = tmp_path_factory.mktemp("metrics")
    (folder / "reward.py").write_text(REWARD + TOOLS)
    whole = f"{AR}.actor.ppo_mini_batch_size=4"
    rows = []
    taught = [whole, "algorithm.adv_estimator=distill", f"teacher.model.path={toy}/model"]
    several = [[whole, VESPO], OFF_POLICY, PPO, [*SFT, whole, "trainer.test_freq=1"], [whole, *AGENT]]
    several += [taught, [*taught, "distill.divergence=sampled"]]
    mixture = make_tiny_model(folder / "mixture", TinyShape("qwen3_moe"))
    several += [[f"{AR}.model.path={mixture}", f"{AR}.actor.router_replay.mode=R2", f"{AR}.actor.ppo_mini_batch_size=2"]]
    for number, overrides in enumerate(several):
        told = [override.format(reward=folder / "reward.py") for override in overrides]
        rows += steps_here(toy, folder / str(number), *SHORT, *told).values()
    quantised = {f"{rlt.MODEL}.quantization": "int8", "trainer.track_memory_every_steps": 1}
    with ready(rlt.settings_of(rlt.brief_toy(folder / "rlt_toy"), folder / "rlt", quantised)) as trainer:
        trainer.run()
    rows += metrics(folder / "rlt").values()
    return {name for row in rows for name in row} - {"step", "run_id"}


def test_every_name_that_a_run_logs_is_on_the_page(logged):
    known = [pattern(name) for name in documented()]
    assert not [name for name in sorted(logged) if not any(each.fullmatch(name) for each in known)]


def test_the_page_names_nothing_that_no_run_logs(logged):
    names = [name for name in documented() if not GPU_ONLY.search(name) and not SEVERAL_WORKERS.search(name)]
    assert not [name for name in set(names) - NOT_HERE if not any(pattern(name).fullmatch(each) for each in logged)]


def test_the_page_lists_the_phases(logged):
    listed = set(re.findall(r"`(\w+)`", PAGE.read_text().split("Phases:")[1]))
    timed = {name.removeprefix("timing_s/") for name in logged if name.startswith("timing_s/")} - {"step"}
    assert timed <= listed
    assert {f"timing_s/{name}" for name in listed - timed} <= NOT_HERE
