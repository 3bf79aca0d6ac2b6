"""Tasks of reasoning-gym and games of textarena, and the one line that says which package is missing."""

import asyncio
import importlib.util

import pytest
from transformers import AutoTokenizer

from recipe.agent.reasoning_gym_tasks import Tasks, score
from recipe.agent.textarena_game import Game, Match, Referee
from verl_memopt.config.schema import Data
from verl_memopt.errors import DataError


def needs(package):
    there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not there, reason=f"needs the package {package}")


def without(package):
    there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(there, reason=f"needs an installation without the package {package}")


def tasks(toy, **files):
    return Tasks(files, Data(train_files=files), AutoTokenizer.from_pretrained(toy / "model"), "train")


@needs("reasoning_gym")
def test_the_rows_are_the_questions_and_the_verifier_scores_the_answers(toy):
    rows = tasks(toy, name="chain_sum", size=3, seed=1, max_digits=1, max_terms=2)
    assert [row.index for row in rows] == [0, 1, 2]
    for row in rows:
        extra = row.extra_info
        assert score(row.data_source, f"<answer>{row.ground_truth}</answer>", row.ground_truth, extra) == 1.0
        assert score(row.data_source, f" {row.ground_truth} ", row.ground_truth, extra) == 1.0
        assert score(row.data_source, "<answer>none</answer>", row.ground_truth, extra) < 1.0
    with pytest.raises(DataError, match=r"data\.train_files=.*chain_sum.*refuses it"):
        tasks(toy, name="chain_sum", size=3, max_digits=-1)
    with pytest.raises(DataError, match=r"give the dataset and its settings"):
        tasks(toy, size=3)


@without("reasoning_gym")
def test_a_missing_reasoning_gym_is_named(toy):
    with pytest.raises(DataError, match=r"data\.train_files: .*pip install reasoning-gym"):
        tasks(toy, name="chain_sum")


@needs("textarena")
def test_a_game_is_played_as_an_environment_and_in_words():
    game, found, guess = Game(), False, 0
    assert "Guess The Number" in game.reset(seed=3)
    while not found and guess < 10:
        guess += 1
        found = "The game is over" in game.play(f"[{guess}]")
    assert 0 <= game.get_reward() <= 1
    assert found
    with pytest.raises(ValueError, match="The game is over"):
        game.play("[1]")

    async def in_words():
        referee = Referee({"name": "game"})
        await referee.start_interaction("a", game="GuessTheNumber-v0", seed=3, name="game")
        answers = [
            await referee.generate_response("a", [{"role": "assistant", "content": f"I say [{n}]"}]) for n in range(1, guess + 1)
        ]
        await referee.finalize_interaction("a")
        return answers

    answers = asyncio.run(in_words())
    assert [ends for ends, *_ in answers] == [False] * (guess - 1) + [True]
    assert answers[-1][2] == game.get_reward()


@without("textarena")
def test_a_missing_textarena_is_named():
    with pytest.raises(ImportError, match="pip install textarena"):
        Match("GuessTheNumber-v0", 0)
