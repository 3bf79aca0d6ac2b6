"""The rewards of a whole step against the naive reference, in every mode, and the work of several ranks."""

import logging
import math
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.recipe.rlt import naive
from tests.recipe.rlt.test_student_pass import CPU, HEAT, encode, random_samples, scored
from tests.recipe.rlt.tokens import ids
from tests.rlt import ALIAS, AR, MODEL, RLT, SWAP, brief_toy, settings_of
from tests.trainer.conftest import Member, group_of
from tests.worker.test_build_policy import built
from verl_memopt.data.batch import Ragged
from verl_memopt.memory.quantized_frozen_torch import FORMATS as QUANTIZATIONS
from verl_memopt.memory.token_packing import spans
from verl_memopt.observe.phase import PhaseClock
from verl_memopt.recipes.rlt import scorer
from verl_memopt.recipes.rlt.dataset import FORMATS, RltPrompts
from verl_memopt.recipes.rlt.formula import rlt_scores
from verl_memopt.recipes.rlt.scorer import ACCEPTED, ExplanationBatch, RankCheck, RltScorer, rank_correlation, spearman
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student import (
    Student,
    StudentLogProbs,
    StudentReply,
    compute_student_log_probs,
    student_batch,
    student_micro_batches,
)
from verl_memopt.recipes.rlt.student_rows import SOLUTION, THINK, StudentEncoder
from verl_memopt.trainer.build import build_learner, build_run
from verl_memopt.trainer.loop import start_workers
from verl_memopt.trainer.micro_batching import Budget
from verl_memopt.trainer.step import score
from verl_memopt.worker.policy import LogProbs
from verl_memopt.worker.roles import exact_weights_of
from verl_memopt.worker.worker import Worker

SHORT = FORMATS["short"]


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


MAPPED = {
    f"{AR}.model.load_mode": "mmap",
    f"{AR}.ref.fsdp_config.param_offload": True,
    f"{MODEL}.fsdp_config.param_offload": True,
}
TEACHES = {f"{RLT}.kl_teacher": "reference"}
MODES = {
    "offloaded, schulman, each row its own prompt": (
        {
            f"{MODEL}.fsdp_config.param_offload": True,
            f"{AR}.actor.fsdp_config.param_offload": True,
            f"{RLT}.use_schulman_kl_estimation": True,
            f"{AR}.actor.use_prefix_grouper": False,
        },
        "student",
        "teacher",
    ),
    "mapped, one row at a time": (
        MAPPED | {f"{RLT}.logits_chunk_tokens": 7, f"{RLT}.max_tokens_per_micro_batch": 1},
        "student",
        "teacher",
    ),
    "a teacher at temperature one": ({f"{RLT}.unbias_teacher_log_probs": False}, "student", "teacher"),
    "a mapped student alone": (
        {f"{AR}.model.load_mode": "mmap", f"{AR}.actor.use_kl_loss": False, f"{MODEL}.fsdp_config.param_offload": True},
        "student",
        "teacher",
    ),
    "alias_ref, without the teacher": (ALIAS | {f"{RLT}.include_teacher_think_entropy": False}, "teacher", "teacher"),
    "alias with LoRA": (ALIAS | {f"{AR}.model.lora_rank": 2}, "teacher", "teacher"),
    "swap of mapped files under a reference that teaches": (SWAP | MAPPED | TEACHES, "student", "teacher"),
    "the reference teaches": (TEACHES | {f"{AR}.ref.model.path": "student", f"{MODEL}.path": "teacher"}, "teacher", "student"),
}


@pytest.mark.parametrize("mode", MODES)
def test_rewards_of_a_step_are_the_naive_ones(toy, tmp_path, mode):
    more, student, teacher = MODES[mode]
    paths = {key: str(toy / value) for key, value in more.items() if key.endswith("model.path") and value is not None}
    settings = settings_of(toy, tmp_path / "run", more | paths)
    with learner_of(settings) as learner:
        batch = learner.scored(1)
        expected = expected_of(batch, toy, settings, student, teacher, HEAT if mode != "a teacher at temperature one" else 1.0)
        found = [(result.score, result.extra["r_ss"], result.extra["r_kl"]) for result in batch.results]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-5)
        assert batch.metrics["rlt/reward"] == pytest.approx(sum(reward for reward, _, _ in expected) / 6, abs=1e-5)
        again = score(learner.scorer, batch)
        assert [result.score for result in again.results] == [result.score for result in batch.results]
        # The log-probs of the step are those of a pass of the teacher over the explanations.
        infos = [row.extra_info for row in batch.answers.rows]
        own = learner.scorer.score(ExplanationBatch.of(infos, batch.answers.generation.response_ids, batch.names))
        torch.testing.assert_close(own.scores.reward, torch.tensor(found)[:, 0], rtol=0, atol=1e-5)
    assert len({round(reward, 3) for reward, _, _ in expected}) > 3


def test_the_blank_line_after_the_tag_is_scored_by_both_models(toy, tmp_path):
    """The explanation begins with the blank line, which the teacher's prompt then does not hold."""
    more = {f"{RLT}.include_forced_prefix": True, f"{RLT}.align": "retokenize"}
    with learner_of(settings_of(toy, tmp_path / "run", more)) as learner:
        prompts = learner.scorer.encoder.prompts
        tokenizer = prompts.tokenizer
        responses = Ragged.from_rows([ids(tokenizer, "1", "</explanation>")], torch.int64)
        scored = learner.scorer.score(ExplanationBatch(["1+2="], ["3"], responses, ["f:1"]))
    thought = ids(tokenizer, "\n\n1")
    assert scored.rows.part(THINK).flat.tolist() == thought
    prompt = ids(tokenizer, prompts.teacher("1+2=", "3")[0].removesuffix("\n\n"))
    v = naive.log_probs(lm(toy / "teacher"), prompt + thought, HEAT)[len(prompt) - 1 :]
    assert scored.teacher.tolist() == pytest.approx(v, abs=1e-5)


class Ranks(Member):
    """A worker whose log-probs are functions of the tokens alone: the student's of the solution the id / -100."""

    def call_role(self, method, rows, micro_batches, temperature, exact):
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
    budgets = (Budget(True, tokens, None, "key") for tokens in (512, rlt.max_tokens_per_micro_batch))
    return RltScorer(group_of(*members), rlt, StudentEncoder(prompts, rlt, stops), HEAT, *budgets)


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


@pytest.mark.parametrize("ranks", [2, 7])
def test_any_number_of_ranks_gives_the_same_rewards_in_the_same_number_of_micro_batches(tokenizer, ranks):
    explained = explained_of(tokenizer, "1", "12", "123", "", "12345")
    one = scorer_of([Ranks(0)], tokenizer, max_tokens_per_micro_batch=80).score(explained)
    members = [Ranks(rank) for rank in range(ranks)]
    several = scorer_of(members, tokenizer, max_tokens_per_micro_batch=80).score(explained)
    assert torch.equal(several.scores.reward, one.scores.reward)
    assert torch.equal(several.teacher, one.teacher)
    asked = [next(call for call in member.asked if call[2] == "call_role")[3] for member in members]
    assert len({len(bins) for _, _, bins, *_ in asked}) == 1
    assert sum(rows.num_rows for _, rows, *_ in asked) == 5
    assert ranks < 7 or min(rows.num_rows for _, rows, *_ in asked) == 0


def test_ranks_compute_the_prompts_that_they_carry_in_step(tokenizer):
    """Else the collectives of a student that is sharded over them would not match."""
    questions = ["1+" * 30] * 4 + [f"{place}+1=" for place in range(4)]
    responses = Ragged.from_rows([ids(tokenizer, "1", "</explanation>")] * 8, torch.int64)
    members = [Ranks(0), Ranks(1)]
    explained = ExplanationBatch(questions, ["1"] * 8, responses, [f"f:{place + 1}" for place in range(8)])
    scorer_of(members, tokenizer, max_tokens_per_micro_batch=130).score(explained)
    carried = [
        [
            reading
            for _, rows, bins, *_ in (call[3] for call in member.asked if call[2] == "call_role")
            for _, reading in spans(bins, student_batch(rows).row_tokens())
        ]
        for member in members
    ]
    assert sorted(map(max, ([reading or 0 for reading in each] for each in carried))) == [0, 2]
    assert len({tuple(reading is None for reading in each) for each in carried}) == 1


def test_a_micro_batch_holds_no_more_tokens_than_its_cap(tokenizer):
    member = Ranks(0)
    scored = scorer_of([member], tokenizer, max_tokens_per_micro_batch=110).score(explained_of(tokenizer, *["12"] * 6))
    tokens, micro_batches = (scored.metrics()[f"rlt/{name}"] for name in ("tokens", "micro_batches"))
    assert micro_batches == len(member.asked[-1][3][2]) > 1
    assert tokens <= 110 * micro_batches
    assert scored.metrics()["perf/student_tokens_per_second"] == pytest.approx(tokens / 0.5)


def test_given_log_probs_of_responses_need_no_pass_of_the_teacher(tokenizer):
    member, explained = Ranks(0), explained_of(tokenizer, "1", "12")
    log_probs = explained.responses.flat.float() / -50 * HEAT
    scored = scorer_of([member], tokenizer).score(explained, log_probs)
    assert [method for _, _, method, _ in member.asked] == ["call_role"]
    assert torch.equal(scored.scores.reward, scorer_of([Ranks(0)], tokenizer).score(explained).scores.reward)
    settings = {"include_teacher_think_entropy": False, "kl_teacher": "reference"}
    alone = scorer_of([member], tokenizer, **settings)
    assert (alone.score(explained).teacher, alone.reads_reference) == (None, False)


KEY = "reward_model.model.quantization"


def naive_spearman(one, other):
    """Pearson's correlation of mean ranks, with the ranks from sorting."""

    def ranks(values):
        ordered = sorted(values)
        places = {value: [i for i, each in enumerate(ordered) if each == value] for value in values}
        return [sum(places[value]) / len(places[value]) for value in values]

    a, b = ranks(one), ranks(other)
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    top = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    return top / math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_ties_share_their_mean_rank(pairs):
    one, other = ([float(pair[place]) for pair in pairs] for place in (0, 1))
    result = spearman(torch.tensor(one), torch.tensor(other))
    if len(set(one)) == 1 or len(set(other)) == 1:
        assert math.isnan(result)
    else:
        assert result == pytest.approx(naive_spearman(one, other), abs=1e-9)


def test_groups_count_alike_and_what_has_no_order_is_left_out():
    exact = torch.tensor([0.0, 1.0, 2.0, 3.0, 100.0, 101.0])
    rewards = torch.tensor([0.0, 1.0, 2.0, 3.0, 101.0, 100.0])
    agreement = rank_correlation(rewards, exact, [0, 0, 0, 0, 1, 1])
    assert (agreement.mean, agreement.lowest, agreement.num_groups) == (0.0, -1.0, 2)
    exact = torch.tensor([0.0, 1.0, 2.0, 5.0, 5.0, 7.0])
    rewards = torch.tensor([0.0, math.nan, 2.0, 1.0, 2.0, 3.0])
    agreement = rank_correlation(rewards, exact, [0, 0, 0, 1, 1, 2])
    assert (agreement.mean, agreement.num_groups) == (1.0, 1)
    nothing = rank_correlation(rewards, exact, list(range(6)))
    assert nothing.num_groups == 0
    assert nothing.warning("nf4", KEY) is None


def test_a_low_agreement_is_warned_of_with_the_way_out():
    rewards = torch.tensor([1.0, 3.0, 2.0, 4.0])
    agreement = rank_correlation(rewards, torch.tensor([1.0, 2.0, 3.0, 4.0]), [0] * 4)
    text = agreement.warning("nf4", KEY)
    assert text.startswith(f"{KEY}=nf4: ")
    assert "0.800 (mean over 1 groups; 0.95 is expected)" in text
    assert text.endswith(f"Set {KEY}=int8 or none.")
    assert agreement.warning("int8", KEY).endswith(f"Set {KEY}=none.")
    assert rank_correlation(rewards, rewards, [0] * 4).warning("int8", KEY) is None


def test_each_quantisation_has_its_bound():
    assert ACCEPTED.keys() == QUANTIZATIONS.keys()


SETTINGS = RltReward()


class Pass:
    """A scored batch: its rows, its scores, and the unquantised weights as a function."""

    def __init__(self, folder, mesh, kind, repeats=4):
        samples = random_samples(24, seed=7, repeats=repeats)
        self.student, self.folder = built(folder, mesh, quantization=kind), folder
        self.rows, _ = encode(samples)
        self.addresses = [f"train.jsonl:{place // repeats}" for place in range(24)]
        tokens = int(self.rows.parts[:, THINK].sum())
        self.teacher = torch.randn(tokens, generator=torch.Generator().manual_seed(1)) - 5.0
        self.scores = self.scored(scored(self.student, self.rows))
        self.exact_rows = []

    def scored(self, log_probs):
        return rlt_scores(SETTINGS, self.rows, log_probs.think, self.teacher, log_probs.solution, self.addresses)

    def exact(self, rows):
        self.exact_rows.append(rows.num_rows)
        bins = student_micro_batches(student_batch(rows).row_tokens(), 512)
        with exact_weights_of(self.student, self.folder, CPU):
            return compute_student_log_probs(self.student, rows, bins, HEAT, CPU)

    def check(self, kind):
        check = RankCheck(SETTINGS, kind, KEY)
        return check, check.check(self.rows, self.scores, self.teacher, self.addresses, self.exact)


def test_the_correlation_is_that_of_two_whole_scorings(tiny_folder, one_rank):
    scored_batch = Pass(tiny_folder, one_rank, "nf4")
    _, metrics = scored_batch.check("nf4")
    whole = scored_batch.scored(scored(built(tiny_folder, one_rank), scored_batch.rows))
    group = [place // 4 for place in range(24)]
    expected = rank_correlation(scored_batch.scores.training_rewards(), whole.training_rewards(), group)
    assert expected.num_groups == 6
    assert metrics == {"rank_correlation": pytest.approx(expected.mean, abs=1e-9)}


def test_the_check_is_made_once_and_on_some_groups_alone(tiny_folder, one_rank, monkeypatch):
    monkeypatch.setattr(scorer, "MOST_GROUPS", 2)
    scored_batch = Pass(tiny_folder, one_rank, "nf4")
    check, _ = scored_batch.check("nf4")
    assert scored_batch.exact_rows == [8]
    arguments = scored_batch.rows, scored_batch.scores, scored_batch.teacher, scored_batch.addresses, scored_batch.exact
    assert check.check(*arguments) == {}
    assert scored_batch.exact_rows == [8]


def test_a_batch_without_groups_is_left_to_the_next(tiny_folder, one_rank):
    scored_batch = Pass(tiny_folder, one_rank, "nf4", repeats=1)
    check, metrics = scored_batch.check("nf4")
    assert metrics == {}
    assert not check.done
    assert scored_batch.exact_rows == []


@pytest.mark.parametrize(("spoilt", "warns"), [(False, False), (True, True)])
def test_a_student_that_orders_otherwise_is_warned_of(tiny_folder, one_rank, caplog, spoilt, warns):
    scored_batch = Pass(tiny_folder, one_rank, "int8")
    if spoilt:
        with torch.no_grad():  # codes that say nothing, under scales that are right
            for name, parameter in scored_batch.student.named_parameters():
                if name.endswith("qweight"):
                    codes = parameter[:, :64]
                    parameter[:, :64] = codes[:, torch.randperm(64, generator=torch.Generator().manual_seed(2))]
        scored_batch.scores = scored_batch.scored(scored(scored_batch.student, scored_batch.rows))
    with caplog.at_level(logging.INFO):
        _, metrics = scored_batch.check("int8")
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert bool(warnings) == warns
    assert (metrics["rank_correlation"] < 0.98) == warns
    if warns:
        assert warnings[0].startswith(f"{KEY}=int8: the student orders")
