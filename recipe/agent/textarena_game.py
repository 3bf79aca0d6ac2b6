"""Games of textarena for one player: as an environment, whose tool makes a move, and as a user, who answers each move in words.

python recipe/agent/textarena_game.py runs/game/train.parquet --game GuessTheNumber-v0 --rows 64
"""

import argparse
from pathlib import Path
from typing import Any

from verl_memopt.agents.verl_tools import BaseInteraction
from verl_memopt.data.sources import write_parquet


class Match:
    """A game from its first observation to its reward."""

    def __init__(self, game: str, seed: int) -> None:
        try:
            import textarena
        except ImportError as problem:
            raise ImportError(f"textarena cannot be imported ({problem}). Run pip install textarena.") from problem
        self._env = textarena.make(game)
        self._env.reset(num_players=1, seed=seed)
        self.reward, self.done, self._seen = 0.0, False, ""

    def observation(self) -> str:
        """Return what the game has said since the last call. textarena repeats the whole game."""
        text = str(self._env.get_observation()[1])
        new, self._seen = text.removeprefix(self._seen), text
        return new[max(new.find("[GAME]"), 0) :].strip()  # what the player said is known

    def move(self, text: str) -> str:
        if self.done:
            raise ValueError("The game is over.")
        self.done, _ = self._env.step(text)
        if self.done:
            rewards, info = self._env.close()
            self.reward = float(rewards[0])
            return f"The game is over. {info[0].get('reason', '')}".strip()
        return self.observation()


class Game:
    """An environment: the column ``game`` names the game, and ``seed`` decides its course."""

    def reset(self, seed: int, game: str = "GuessTheNumber-v0", **row: Any) -> str:
        self._match = Match(game, seed)
        return self._match.observation()

    def play(self, move: str) -> str:
        """Make your next move.

        Args:
            move: The move in the form that the game asks for.
        """
        return self._match.move(move)

    def get_reward(self) -> float:
        return self._match.reward


class Referee(BaseInteraction):
    """A user who reads each turn of the model as a move, and answers what the game says. It needs no tools."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._matches: dict[str, Match] = {}

    async def start_interaction(self, instance_id: str | None = None, game: str = "", seed: int = 0, **kwargs: Any) -> str:
        assert instance_id is not None
        self._matches[instance_id] = Match(game, seed)
        self._matches[instance_id].observation()  # the row's prompt has it
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        match = self._matches[instance_id]
        said = match.move(messages[-1]["content"])
        return match.done, said, match.reward, {}

    async def finalize_interaction(self, instance_id: str) -> None:  # type: ignore[override]
        del self._matches[instance_id]


def last_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Return what the game paid at its end, 0 if the conversation ended before."""
    scores = extra_info["environments"].turn_scores
    return float(scores[-1]) if scores else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Write rows for the user `game`: the prompt is the game's first observation.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--game", default="GuessTheNumber-v0")
    parser.add_argument("--rows", type=int, default=64)
    given = parser.parse_args()
    rows = []
    for seed in range(given.rows):
        prompt = [{"role": "user", "content": Match(given.game, seed).observation()}]
        user = {"name": "game", "game": given.game, "seed": seed}
        rows.append({"prompt": prompt, "data_source": "textarena", "extra_info": {"interaction_kwargs": user}})
    given.file.parent.mkdir(parents=True, exist_ok=True)
    write_parquet(given.file, rows)


if __name__ == "__main__":
    main()
