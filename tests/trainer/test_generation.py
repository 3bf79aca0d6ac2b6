import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rewards.processes import all_gone, wait_until
from tests.trainer.conftest import Member, group_of
from verl_memopt.config.schema import CustomReward, Rollout, ValKwargs
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.prompts import StepPrompts
from verl_memopt.errors import RewardError, RolloutError, Stopped
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.rollout.engine import FinishedRows, Generation
from verl_memopt.trainer.rollouts import Generator, sampling_seeds
from verl_memopt.trainer.scoring import Rewarder, ScoringFollower


def prompt_row(index, text="1+1="):
    return PromptRow(index, text, "toy/arithmetic", "2", {}, f"rows.jsonl:{index + 1}")


class Letters:
    """Decodes a token as the letter of its number."""

    def batch_decode(self, rows, skip_special_tokens):
        assert skip_special_tokens
        return ["".join(chr(token) for token in row) for row in rows]


class Doubler(Member):
    """Answers a prompt with its first token and twice that."""

    def generate(self, prompt_ids, seeds, settings, may_stop):
        responses = [[ids[0], 2 * ids[0]] for ids in prompt_ids]
        log_probs = [[-float(token) for token in row] for row in responses] if settings.log_probs else None
        return Generation(responses, log_probs, ["length"] * len(responses), cached_tokens=len(responses))


def doubled(num_prompts, ranks, **rollout):
    """Return the answers to one prompt for each number, and what each rank was asked."""
    workers = group_of(*map(Doubler, range(ranks)))
    generator = Generator(Rollout(n=1, seed=5, response_length=4, **rollout), Letters(), workers, frees_engine=False)
    prompts = StepPrompts([prompt_row(n) for n in range(num_prompts)], [[n, 0] for n in range(num_prompts)], 0, 0)
    return generator.generate(prompts, 3).generation, [member.asked[0][3] for member in workers.group.members]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_answers_come_in_the_order_of_the_prompts_spread_evenly_over_any_number_of_engines(ranks):
    generation, asked = doubled(5, ranks)
    assert generation.response_ids == [[n, 2 * n] for n in range(5)]
    assert generation.log_probs == [[-n, -2 * n] for n in range(5)]
    assert generation.finish_reasons == ["length"] * 5
    assert generation.cached_tokens == 5
    seeds = [seed for _, seeds, *_ in asked for seed in seeds]
    assert seeds == sampling_seeds([prompt_row(n) for n in range(5)], 1, 5, 3)
    counts = [len(prompt_ids) for prompt_ids, *_ in asked]
    assert max(counts) - min(counts) <= 1
    assert doubled(1, 1, calculate_log_probs=False)[0].log_probs is None


def test_the_ranks_of_one_engine_get_the_same_prompts_and_answer_once():
    generation, asked = doubled(4, 4, tensor_model_parallel_size=2)
    assert [ids[0] for ids in generation.response_ids] == [0, 1, 2, 3]
    prompts_per_rank = [[ids[0] for ids in prompt_ids] for prompt_ids, *_ in asked]
    assert prompts_per_rank == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_every_sample_has_a_seed_of_its_own_that_depends_on_its_prompt_and_step():
    rows = [prompt_row(index) for index in range(4)]
    seeds = [seed for step in range(3) for seed in sampling_seeds(rows, 3, 5, step)]
    assert len(set(seeds)) == 4 * 3 * 3
    forwards, backwards = sampling_seeds(rows, 2, 5, 1), sampling_seeds(rows[::-1], 2, 5, 1)
    assert forwards[:2] == backwards[-2:]
    assert forwards != sampling_seeds(rows, 2, 6, 1)


class Engine(Member):
    """Answers A and then B, or as it is told to."""

    outcome = None

    def generate(self, prompt_ids, seeds, settings, may_stop):
        self.may_stop = may_stop
        if isinstance(self.outcome, Exception):
            raise self.outcome
        if self.outcome == "stopped":
            return None
        return Generation([[65], *[[66]] * (len(seeds) - 1)], [[-1.0]] * len(seeds), ["stop"] * len(seeds))

    def release_engine(self):
        return None


def generator_of(member, frees_engine=True):
    return Generator(
        Rollout(n=2, seed=5, response_length=4, val_kwargs=ValKwargs(n=1)), Letters(), group_of(member), frees_engine
    )


def methods(member):
    return [method for _, _, method, _ in member.asked]


PROMPTS = StepPrompts([prompt_row(0), prompt_row(1)], [[1], [1], [2], [2]], 0, 0)


def test_a_rollout_answers_each_prompt_n_times_and_then_the_engine_releases_its_memory():
    engine = Engine(0)
    answers = generator_of(engine).generate(PROMPTS, 3)
    assert [row.index for row in answers.rows] == [0, 0, 1, 1]
    assert answers.texts == ["A", "B", "B", "B"]
    assert engine.asked[0][3][1] == sampling_seeds(PROMPTS.prompts, 2, 5, 3)
    assert (engine.may_stop, methods(engine)) == (True, ["generate", "release_engine"])


def test_a_further_round_of_a_step_has_seeds_of_its_own_and_the_engine_may_stay_awake():
    engine = Engine(0)
    generator = generator_of(engine)
    for earlier_rounds in range(3):
        generator.generate(PROMPTS, 3, earlier_rounds, stays_awake=True)
    seeds = [seed for _, _, _, (_, seeds, *_) in engine.asked for seed in seeds]
    assert len(set(seeds)) == 3 * 4
    assert methods(engine) == ["generate"] * 3


@pytest.mark.parametrize("frees_engine", [True, False])
def test_a_greedy_round_answers_each_prompt_once_and_the_engine_releases_its_memory(frees_engine):
    engine = Engine(0)
    answers = generator_of(engine, frees_engine).generate_greedy(PROMPTS, 3)
    prompt_ids, _, sampling, _ = engine.asked[0][3]
    assert prompt_ids == answers.prompt_ids == [[1], [2]]
    assert [row.index for row in answers.rows] == [0, 1]
    assert answers.texts == ["A", "B"]
    assert not sampling.do_sample
    assert not sampling.log_probs
    assert answers.generation.log_probs is None
    assert methods(engine) == ["generate", *["release_engine"] * frees_engine]


REWARD = """
import pathlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    scored = pathlib.Path(__file__).with_name("scored_" + solution_str)
    assert not scored.exists(), "each answer is scored once"
    scored.touch()
    if solution_str == "bad":
        raise ValueError("no score")
    return {"score": float(len(solution_str)), "text": solution_str}
"""


class EarlyEngine(Member):
    """Its second answer is complete, and scored, before the others exist. Then it ends as it is told to."""

    TEXTS = ("one", "early", "three", "four")

    def __init__(self, folder, texts=TEXTS, error=None):
        super().__init__(0)
        self.folder, self.texts, self.error = folder, texts, error

    def generate(self, prompt_ids, seeds, settings, may_stop, finished):
        ids = [[ord(letter) for letter in text] for text in self.texts]
        FinishedRows(Path(finished)).write(1, ids[1])
        assert wait_until(lambda: (self.folder / f"scored_{self.texts[1]}").exists())
        if self.error is not None:
            raise self.error
        return Generation(ids, None, ["stop"] * len(ids))

    def release_engine(self):
        return None


@pytest.fixture
def early(tmp_path):
    """Gives an engine's generator that lets rewards follow, and the rewarder."""
    (tmp_path / "reward.py").write_text(REWARD)

    @contextmanager
    def make(*arguments, **settings):
        with RewardRunner(CustomReward(path=str(tmp_path / "reward.py"), **settings), 2) as runner:
            follower = ScoringFollower.of(Rewarder(runner), Letters(), tmp_path)
            yield replace(generator_of(EarlyEngine(tmp_path, *arguments)), follower=follower), Rewarder(runner)

    yield make
    assert not list(tmp_path.glob(".finished*"))
    assert "reward-follower" not in {thread.name for thread in threading.enumerate()}


def test_an_answer_is_scored_while_others_are_generated_and_all_keep_their_order(early):
    with early() as (generator, rewarder):
        answers = generator.generate(PROMPTS, 3)
        results, _ = replace(rewarder, clock=generator.workers.clock).score_answers(answers, object())
    assert [result.extra["text"] for result in results] == answers.texts == list(EarlyEngine.TEXTS)
    assert [result.score for result in results] == [3.0, 5.0, 5.0, 4.0]
    assert {"timing_s/gen", "timing_s/reward_in_rollout", "timing_s/reward"} == generator.workers.clock.timings().keys()


def test_an_early_answer_that_fails_ends_the_run_where_the_answers_are_scored(early):
    with early(("one", "bad", "three", "four")) as (generator, rewarder):
        answers = generator.generate(PROMPTS, 3)
        with pytest.raises(RewardError, match=r"^rows\.jsonl:1: .*(?s:.*)no score"):
            rewarder.score_answers(answers, None)
    with early(("one", "bad2", "bad", "four"), on_error="score", fallback_score=-1.0) as (generator, rewarder):
        results, _ = rewarder.score_answers(generator.generate(PROMPTS, 3), None)
    assert [(result.score, result.failed) for result in results] == [(3.0, False), (4.0, False), (-1.0, True), (4.0, False)]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Stopped(), RolloutError("broken")])
def test_a_rollout_that_ends_early_leaves_no_thread_and_no_reward_process(early, error):
    with early(EarlyEngine.TEXTS, error) as (generator, rewarder):
        pids = rewarder.runner.pids()
        with pytest.raises(type(error)):
            generator.generate(PROMPTS, 3)
        assert rewarder.runner.pids() == []
        assert all_gone(pids)


def test_answers_that_nobody_scored_do_not_mix_with_those_of_the_next_rollout(early, tmp_path):
    with early() as (generator, rewarder):
        generator.generate(PROMPTS, 3)
        for scored in tmp_path.glob("scored_*"):
            scored.unlink()
        results, _ = rewarder.score_answers(generator.generate(PROMPTS, 4), None)
        assert [result.extra["text"] for result in results] == list(EarlyEngine.TEXTS)


def test_what_needs_all_answers_or_the_device_scores_after_the_rollout(tmp_path):
    with RewardRunner(CustomReward(), 1, manager="batch") as runner:
        assert ScoringFollower.of(Rewarder(runner), Letters(), tmp_path) is None
    with RewardRunner(CustomReward(), 1) as runner:
        assert ScoringFollower.of(Rewarder(runner, model=object()), Letters(), tmp_path) is None
        assert ScoringFollower.of(Rewarder(runner), Letters(), tmp_path) is not None
    assert ScoringFollower.of(Rewarder(None), Letters(), tmp_path) is None


def test_an_engine_that_keeps_its_memory_is_not_asked_to_release_it():
    engine = Engine(0)
    generator_of(engine, frees_engine=False).generate(PROMPTS, 3)
    assert methods(engine) == ["generate"]


@pytest.mark.parametrize("method", ["generate", "generate_greedy"])
def test_a_rollout_that_is_given_up_releases_the_engine_too(method):
    engine = Engine(0)
    engine.outcome = "stopped"
    with pytest.raises(Stopped):
        getattr(generator_of(engine), method)(PROMPTS, 3)
    assert methods(engine) == ["generate", "release_engine"]


def test_a_worker_that_failed_is_asked_for_nothing_more():
    engine = Engine(0)
    engine.outcome = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        generator_of(engine).generate(PROMPTS, 3)
    assert methods(engine) == ["generate"]


def test_a_validation_has_its_own_number_of_samples_and_is_not_given_up():
    engine = Engine(0)
    answers = generator_of(engine).generate_validation(PROMPTS.prompts, [[1], [2]], 3)
    assert [row.index for row in answers.rows] == [0, 1]
    assert (engine.may_stop, methods(engine), engine.asked[0][0]) == (False, ["generate"], "testing")
