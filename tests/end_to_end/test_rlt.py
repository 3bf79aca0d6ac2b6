"""RLT end to end: runs of a few steps in every residency, and a teacher that learns to explain."""

import dataclasses
import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipe.rlt.make_toy import make_rlt_toy
from tests.end_to_end.runs import learned, lines_of, metrics
from tests.rlt import ALIAS, AR, MODEL, RLT, SWAP, brief_toy, settings_of
from tests.trainer.conftest import ready
from verl_memopt.data.batch import Ragged
from verl_memopt.recipes.rlt.scorer import ExplanationBatch
from verl_memopt.recipes.rlt.student_rows import THINK


def trained(settings):
    """Gives the metrics of a run that has taken its steps."""
    with ready(settings) as trainer:
        trainer.run()
    return metrics(settings.trainer.default_local_dir)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return brief_toy(tmp_path_factory.mktemp("rlt") / "toy")


OFFLOADED = {f"{role}.fsdp_config.param_offload": True for role in (f"{AR}.actor", f"{AR}.ref", MODEL)}
RUNS = {
    "separate": {},
    "all offloaded": {**OFFLOADED, f"{AR}.rollout.free_cache_engine": True},
    "alias_ref": {**ALIAS, **OFFLOADED},
    "alias with LoRA": {**ALIAS, f"{AR}.model.lora_rank": 2},
    "swap": SWAP,
    "critic": {"algorithm.adv_estimator": "gae", "critic.ppo_max_token_len_per_gpu": 256, f"{AR}.actor.use_kl_loss": False},
    "int8 and resampled": {f"{MODEL}.quantization": "int8", "algorithm.use_pf_ppo": True, "algorithm.adv_estimator": "rloo"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("all offloaded", "alias with LoRA") else ()) for name in RUNS]
)
def test_a_run_trains_validates_and_reports_the_parts_of_the_reward(toy, tmp_path, name):
    more = {**RUNS[name], "trainer.test_freq": 2, "data.val_batch_size": 4, "trainer.rollout_data_dir": str(tmp_path / "rows")}
    rows = trained(settings_of(toy, tmp_path / "run", more))
    for step in (1, 2):
        row = rows[step]
        assert row["rlt/reward"] == pytest.approx(row["rlt/r_ss"] - row["rlt/r_kl"] + row["rlt/match"], abs=1e-4)
        assert row["rlt/reward"] == pytest.approx(row["critic/score/mean"], rel=1e-5)
        assert row["rlt/num_rows"] == 6
        assert sum(value for key, value in row.items() if key.startswith("rlt/status/")) == pytest.approx(1)
        assert row["actor/grad_norm"] > 0
        assert {"timing_s/reward", "timing_s/old_log_prob", "rlt/tokens", "perf/student_tokens_per_second"} <= row.keys()
        samples = lines_of(tmp_path / "rows" / f"{step}.jsonl")
        assert [sample["score"] for sample in samples] == pytest.approx(
            [sample["r_ss"] - sample["r_kl"] + sample["match"] for sample in samples], abs=1e-4
        )
    assert math.isfinite(rows[2]["val-core/rlt/reward/mean@1"])
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")


def test_a_row_without_room_for_its_solution_leaves_its_group(toy, tmp_path):
    more = {f"{RLT}.max_student_len": 42, f"{RLT}.overlong": "skip", "trainer.test_freq": 2}
    rows = trained(settings_of(toy, tmp_path / "run", more))
    assert rows[1]["reward/invalid_rows"] == 6 * rows[1]["rlt/status/skipped"] > 0
    assert rows[1]["critic/advantages/max"] == rows[1]["critic/advantages/min"] == 0
    assert rows[1]["actor/skipped_updates"] == 0


def test_a_resumed_run_is_the_run_without_a_break(toy, tmp_path):
    whole = trained(settings_of(toy, tmp_path / "whole", ALIAS))
    for steps in (1, 2):
        saves = {"trainer.total_training_steps": steps, "trainer.save_freq": 1}
        broken = trained(settings_of(toy, tmp_path / "broken", {**ALIAS, **saves}))
    assert learned(broken[2]) == learned(whole[2])


STEPS = 100
LEARNING = {
    "data.train_batch_size": 8,
    "data.val_max_samples": 64,
    f"{AR}.actor.ppo_mini_batch_size": 8,
    f"{AR}.actor.ppo_max_token_len_per_gpu": 4096,
    f"{AR}.actor.optim.lr": 3e-5,
    f"{AR}.rollout.n": 8,
    f"{AR}.rollout.val_kwargs.do_sample": True,
    f"{AR}.rollout.val_kwargs.temperature": 0.7,
    f"{RLT}.max_tokens_per_micro_batch": 8192,
    "trainer.total_training_steps": STEPS,
    "trainer.test_freq": STEPS,
    "trainer.val_before_train": True,
    "data.max_response_length": 48,
}


def solution_log_prob(rlt, explained, responses):
    """Returns the student's mean log-prob of a solution's token after other explanations."""
    other = dataclasses.replace(explained, responses=Ragged.from_rows(responses, torch.int64))
    return float(rlt.score(other).scores.parts["answer_log_prob/mean"].mean())


def shuffled(explanations, end):
    """Returns the tokens of each explanation in a random order, with the end tag after them."""
    rows = [explanation.tolist() for explanation in explanations]
    order = random.Random(5)
    for tokens in rows:
        order.shuffle(tokens)
    return [[*tokens, *end] for tokens in rows]


@pytest.mark.slow
def test_a_teacher_learns_to_explain_what_its_student_then_solves(tmp_path):
    """A careless teacher forgets the carry in two of three explanations. 100 steps of 64 explanations."""
    toy = make_rlt_toy(tmp_path / "toy")
    with ready(settings_of(toy, tmp_path / "run", LEARNING)) as trainer:
        trainer.run()
        (answers, _), *_ = trainer.validator.validate(STEPS).answers
        written = answers.generation.response_ids
        explained = ExplanationBatch.of([row.extra_info for row in answers.rows], written, [row.address for row in answers.rows])
        rlt = trainer.learner.scorer
        end = rlt.prompts.tokenizer(rlt.prompts.rlt_format.explanation.end)["input_ids"]
        explanations = rlt.score(explained).rows.part(THINK).rows()
        means = {
            "of the trained teacher": solution_log_prob(rlt, explained, written),
            "empty": solution_log_prob(rlt, explained, [end] * len(written)),
            "of another question": solution_log_prob(rlt, explained, [*written[1:], written[0]]),
            "with its tokens shuffled": solution_log_prob(rlt, explained, shuffled(explanations, end)),
        }
    rows = metrics(tmp_path / "run")
    names = ("r_ss", "r_kl", "match")
    before, after = ({name: rows[step][f"val-aux/rlt/{name}/mean@1"] for name in names} for step in (0, STEPS))
    ten = (range(1, 11), range(STEPS - 9, STEPS + 1))
    first, last = ({name: sum(rows[step][f"rlt/{name}"] for step in steps) / 10 for name in names} for steps in ten)
    print({"held out before": before, "after": after, "steps 1-10": first, "last 10 steps": last})  # noqa: T201
    print({"mean log-prob of the solution after an explanation": means})  # noqa: T201
    for careless, trained_one in ((before, after), (first, last)):
        assert trained_one["r_ss"] > careless["r_ss"] + 0.5
        assert careless["match"] < -0.05
        assert trained_one["match"] > -0.02
    trained = means.pop("of the trained teacher")
    assert trained > max(means.values()) + 0.5
