from dataclasses import replace

import pytest

from verl_memopt.model.tiny import build_tokenizer
from verl_memopt.trainer.replay import Forge, build_forge, text_of

FORGE = Forge(
    3, 2, prompt_tokens=5, response_tokens=4, num_tokens=50, seed=1, question=" q", solution=" s", answer=" a", log_probs=True
)


def test_rows_have_the_largest_lengths_share_their_prompt_and_have_scores_that_differ():
    answers = FORGE.read(1).answers
    assert {len(ids) for ids in answers.prompt_ids} == {5}
    assert {len(ids) for ids in answers.generation.response_ids} == {4}
    assert {len(row) for row in answers.generation.log_probs} == {4}
    tokens = [token for ids in (*answers.prompt_ids, *answers.generation.response_ids) for token in ids]
    assert min(tokens) >= 0
    assert max(tokens) < 50
    assert len(answers.rows) == 6
    answers = FORGE.read(1).answers
    assert answers.prompt_ids[0] is answers.prompt_ids[1]
    assert answers.rows[0] is answers.rows[1]
    assert len({tuple(ids) for ids in answers.prompt_ids}) == 3
    assert len({tuple(ids) for ids in answers.generation.response_ids}) == 6
    scores = [result.score for result in FORGE.read(1).results]
    assert len(set(scores)) == 6
    assert all(0 <= score < 1 for score in scores)


def test_a_step_depends_on_seed_and_number_alone():
    assert FORGE.read(2) == FORGE.read(2)
    assert FORGE.read(2) != FORGE.read(3)
    assert FORGE.read(2) != replace(FORGE, seed=2).read(2)


def test_the_sizes_are_those_of_the_settings(settled):
    forge = build_forge(settled({"actor_rollout_ref.rollout.calculate_log_probs": False}), build_tokenizer(), 77)
    assert (forge.prompts, forge.samples, forge.prompt_tokens, forge.response_tokens) == (4, 2, 12, 4)
    assert (forge.num_tokens, forge.log_probs, forge.scored) == (77, False, True)
    assert forge.read(1).answers.generation.log_probs is None


def test_a_student_finds_a_question_and_a_solution():
    rows = FORGE.read(1).answers.rows
    assert {row.extra_info["question"] for row in rows} == {"0 q", "1 q", "2 q"}
    assert {row.extra_info["solution"] for row in rows} == {row.ground_truth for row in rows} == {" s"}


@pytest.mark.parametrize("tokens", [1, 7, 100])
def test_a_text_has_about_as_many_tokens_as_asked_for(tokens):
    tokenizer = build_tokenizer()
    assert len(tokenizer(text_of(tokenizer, tokens), add_special_tokens=False)["input_ids"]) == pytest.approx(tokens, abs=4)
