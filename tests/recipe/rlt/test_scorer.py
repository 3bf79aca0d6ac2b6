"""The rewards of a whole step against the naive reference, in every mode, and the work of several ranks."""

import math
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.recipe.rlt import naive
from tests.recipe.rlt.tokens import ids
from tests.rlt import ALIAS, AR, MODEL, RLT, SWAP, brief_toy, settings_of
from tests.trainer.conftest import Member, group_of
from verl_memopt.data.batch import Ragged
from verl_memopt.observe.phase import PhaseClock
from verl_memopt.recipes.rlt.dataset import FORMATS, RltPrompts
from verl_memopt.recipes.rlt.scorer import ExplanationBatch, RltScorer
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student import Student, StudentLogProbs, StudentReply
from verl_memopt.recipes.rlt.student_rows import SKIPPED, SOLUTION, THINK, StudentEncoder
from verl_memopt.trainer.build import build_learner, build_run
from verl_memopt.trainer.loop import start_workers
from verl_memopt.trainer.micro_batching import Budget
from verl_memopt.trainer.step import score
from verl_memopt.worker.policy import LogProbs
from verl_memopt.worker.worker import Worker

SHORT = FORMATS["short"]
HEAT = 0.7


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return brief_toy(tmp_path_factory.mktemp("rlt") / "toy")


@contextmanager
def learner_of(settings):
    context = build_run(settings)
    with context.lock, start_workers(context, PhaseClock()) as workers:
        learner = build_learner(context, workers, None)
        try:
            workers.all("update_weights", Worker.update_weights)
            yield learner
        finally:
            learner.close()


@cache
def lm(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def expected_of(batch, toy, settings, student, teacher, teacher_heat=HEAT):
    """Returns the naive (reward, r_ss, r_kl) of each answer."""
    tokenizer = AutoTokenizer.from_pretrained(toy / "teacher")
    stops = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    expected = []
    for row, response in zip(batch.answers.rows, batch.answers.generation.response_ids, strict=True):
        question, solution = row.extra_info["question"], row.extra_info["solution"]
        sample = naive.sample_of(tokenizer, SHORT, question, solution, response, stops)
        s, u, v = naive.spans(lm(toy / student), lm(toy / teacher), sample, HEAT, teacher_heat)
        expected.append(naive.reward(settings.reward_model.rlt, s, u, v, sample.matched))
    return expected


OFFLOADED = {f"{MODEL}.fsdp_config.param_offload": True, f"{AR}.actor.fsdp_config.param_offload": True}
MAPPED = {
    f"{AR}.model.load_mode": "mmap",
    f"{AR}.ref.fsdp_config.param_offload": True,
    f"{MODEL}.fsdp_config.param_offload": True,
}
MODES = {
    "separate": ({}, "student", "teacher"),
    "offloaded, schulman, each row its own prompt": (
        OFFLOADED | {f"{RLT}.use_schulman_kl_estimation": True, f"{AR}.actor.use_prefix_grouper": False},
        "student",
        "teacher",
    ),
    "mapped, one row at a time": (
        MAPPED | {f"{RLT}.logits_chunk_tokens": 7, f"{RLT}.max_tokens_per_micro_batch": 1},
        "student",
        "teacher",
    ),
    "a mapped student alone": (
        {f"{AR}.model.load_mode": "mmap", f"{AR}.actor.use_kl_loss": False, f"{MODEL}.fsdp_config.param_offload": True},
        "student",
        "teacher",
    ),
    "alias_ref, without the teacher": (ALIAS | {f"{RLT}.include_teacher_think_entropy": False}, "teacher", "teacher"),
    "alias of another reference": (ALIAS | {f"{AR}.ref.model.path": "student"}, "student", "teacher"),
    "alias with LoRA": (ALIAS | {f"{AR}.model.lora_rank": 2}, "teacher", "teacher"),
    "swap": (SWAP, "student", "teacher"),
    "swap of mapped files under a reference that teaches": (
        SWAP | MAPPED | {f"{RLT}.kl_teacher": "reference"},
        "student",
        "teacher",
    ),
    "the reference teaches": (
        {f"{RLT}.kl_teacher": "reference", f"{AR}.ref.model.path": "student", f"{MODEL}.path": "teacher"},
        "teacher",
        "student",
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_rewards_of_a_step_are_the_naive_ones(toy, tmp_path, mode):
    more, student, teacher = MODES[mode]
    paths = {key: str(toy / value) for key, value in more.items() if key.endswith("model.path") and value is not None}
    settings = settings_of(toy, tmp_path / "run", more | paths)
    with learner_of(settings) as learner:
        batch = learner.scored(1)
        expected = expected_of(batch, toy, settings, student, teacher)
        assert [result.score for result in batch.results] == pytest.approx([reward for reward, _, _ in expected], abs=1e-5)
        assert [result.extra["r_ss"] for result in batch.results] == pytest.approx([r for _, r, _ in expected], abs=1e-5)
        assert [result.extra["r_kl"] for result in batch.results] == pytest.approx([r for _, _, r in expected], abs=1e-5)
        assert batch.metrics["rlt/reward"] == pytest.approx(sum(reward for reward, _, _ in expected) / 6, abs=1e-5)
        again = score(learner.scorer, batch)
        assert [result.score for result in again.results] == [result.score for result in batch.results]
    assert len({round(reward, 3) for reward, _, _ in expected}) > 3


def test_a_teacher_at_temperature_one_computes_a_pass_of_its_own(toy, tmp_path):
    settings = settings_of(toy, tmp_path / "run", {f"{RLT}.unbias_teacher_log_probs": False})
    with learner_of(settings) as learner:
        batch = learner.scored(1)
        expected = expected_of(batch, toy, settings, "student", "teacher", teacher_heat=1.0)
    assert [result.score for result in batch.results] == pytest.approx([reward for reward, _, _ in expected], abs=1e-5)


@pytest.mark.parametrize("teacher", ["policy", "reference"])
def test_log_probs_of_the_step_are_those_of_a_pass_of_the_teacher(toy, tmp_path, teacher):
    settings = settings_of(toy, tmp_path / "run", {f"{RLT}.kl_teacher": teacher, f"{AR}.ref.model.path": str(toy / "student")})
    with learner_of(settings) as learner:
        batch = learner.scored(1)
        infos = [row.extra_info for row in batch.answers.rows]
        scored = learner.scorer.score(ExplanationBatch.of(infos, batch.answers.generation.response_ids, batch.names))
    torch.testing.assert_close(scored.scores.reward, torch.tensor([result.score for result in batch.results]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("align", ["concat", "retokenize"])
def test_the_blank_line_after_the_tag_is_scored_by_both_models(toy, tmp_path, align):
    """The explanation begins with the blank line, which the teacher's prompt then does not hold."""
    more = {f"{RLT}.include_forced_prefix": True, f"{RLT}.align": align}
    with learner_of(settings_of(toy, tmp_path / "run", more)) as learner:
        rlt, tokenizer = learner.scorer, learner.scorer.prompts.tokenizer
        explained = ExplanationBatch(
            ["1+2="], ["3"], Ragged.from_rows([ids(tokenizer, "1", "</explanation>")], torch.int64), ["f:1"]
        )
        scored = rlt.score(explained)
    thought = ids(tokenizer, "\n\n1")
    assert scored.rows.part(THINK).flat.tolist() == thought
    prompt = ids(tokenizer, rlt.prompts.teacher("1+2=", "3")[0].removesuffix("\n\n"))
    v = naive.log_probs(lm(toy / "teacher"), prompt + thought, HEAT)[len(prompt) - 1 :]
    assert scored.teacher.tolist() == pytest.approx(v, abs=1e-5)


class Ranks(Member):
    """A worker whose log-probs are functions of the tokens alone: the student's of the solution the id / -100."""

    def of_role(self, method, rows, micro_batches, temperature, exact):
        assert (method, temperature, exact) == (Student.log_probs, HEAT, False)
        assert sorted(row for members in micro_batches for row in members) == list(range(rows.num_rows))
        part = rows.part_of_token()
        flat = rows.ids.flat.float() / -100
        return StudentReply(StudentLogProbs(flat[part == THINK], flat[part == SOLUTION]), 0.5)

    def policy_log_probs(self, batch, micro_batches, temperature):
        assert sorted(row for members in micro_batches for row in members) == list(range(batch.num_rows))
        return LogProbs(batch.responses.flat.float() / -50 * temperature, None)


def scorer_of(members, tokenizer, **settings):
    rlt = RltReward(**settings)
    prompts = RltPrompts(tokenizer, SHORT)
    stops = {tokenizer.eos_token_id}
    return RltScorer(group_of(*members), rlt, prompts, StudentEncoder(prompts, rlt, stops), HEAT, Budget(True, 512, None, "key"))


@pytest.fixture(scope="module")
def tokenizer(toy):
    return AutoTokenizer.from_pretrained(toy / "teacher")


def explained_of(tokenizer, *texts):
    responses = [ids(tokenizer, text, "</explanation>") for text in texts]
    questions = [f"{place // 2}+1=" for place in range(len(texts))]
    addresses = [f"f:{place + 1}" for place in range(len(texts))]
    return ExplanationBatch(
        questions, [str(place) for place in range(len(texts))], Ragged.from_rows(responses, torch.int64), addresses
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_any_number_of_ranks_gives_the_same_rewards_in_the_same_number_of_micro_batches(tokenizer, ranks):
    explained = explained_of(tokenizer, "1", "12", "123", "", "12345")
    one = scorer_of([Ranks(0)], tokenizer, max_tokens_per_micro_batch=80).score(explained)
    members = [Ranks(rank) for rank in range(ranks)]
    several = scorer_of(members, tokenizer, max_tokens_per_micro_batch=80).score(explained)
    assert torch.equal(several.scores.reward, one.scores.reward)
    assert torch.equal(several.teacher, one.teacher)
    asked = [next(call for call in member.asked if call[2] == "of_role")[3] for member in members]
    assert len({len(bins) for _, _, bins, *_ in asked}) == 1
    assert sum(rows.num_rows for _, rows, *_ in asked) == 5
    assert ranks < 7 or min(rows.num_rows for _, rows, *_ in asked) == 0


def test_a_micro_batch_holds_no_more_tokens_than_its_cap(tokenizer):
    member = Ranks(0)
    scored = scorer_of([member], tokenizer, max_tokens_per_micro_batch=110).score(explained_of(tokenizer, *["12"] * 6))
    tokens, micro_batches = (scored.metrics()[f"rlt/{name}"] for name in ("tokens", "micro_batches"))
    assert micro_batches == len(member.asked[-1][3][2]) > 1
    assert tokens <= 110 * micro_batches
    assert scored.metrics()["perf/student_tokens_per_second"] == pytest.approx(tokens / 0.5)


def test_a_skipped_row_has_no_score_and_no_parts(tokenizer):
    scorer = scorer_of([Ranks(0)], tokenizer, max_student_len=70, overlong="skip")
    scored = scorer.score(explained_of(tokenizer, "1", "1" * 30))
    first, second = scored.results()
    assert (second.extra, math.isnan(second.score)) == ({"status": SKIPPED}, True)
    assert first.extra["think_tokens"] == 1
    assert scored.metrics()["rlt/status/skipped"] == 0.5
    assert scored.metrics()["rlt/reward"] == pytest.approx(first.score)


def test_given_log_probs_of_responses_need_no_pass_of_the_teacher(tokenizer):
    member, explained = Ranks(0), explained_of(tokenizer, "1", "12")
    log_probs = explained.responses.flat.float() / -50 * HEAT
    scored = scorer_of([member], tokenizer).score(explained, log_probs)
    assert [method for _, _, method, _ in member.asked] == ["of_role"]
    assert torch.equal(scored.scores.reward, scorer_of([Ranks(0)], tokenizer).score(explained).scores.reward)
    settings = {"include_teacher_think_entropy": False, "kl_teacher": "reference"}
    alone = scorer_of([member], tokenizer, **settings)
    assert (alone.score(explained).teacher, alone.reads_reference) == (None, False)
