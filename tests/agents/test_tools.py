"""Which methods are tools, what the model is told of them, and what is said of those that it cannot be told of."""

import threading

import pytest
from transformers.utils import get_json_schema

from verl_memopt.agents.environments import EnvironmentPool
from verl_memopt.agents.program import Program
from verl_memopt.agents.tools import save_objects, schema_of, tools_of
from verl_memopt.errors import AgentError
from verl_memopt.rewards.score import Limits


class Shop:
    @property
    def open(self):
        raise RuntimeError("read before reset")

    @staticmethod
    def helper(): ...

    def reset(self, **row): ...

    def get_reward(self): ...

    def _count(self): ...

    def buy(self, name: str, count: int = 1, kinds: list[str] | None = None) -> str:
        """Buy a thing.

        Args:
            name: Its name.
            count: How many (choices: [1, 2]).
            kinds: Which ones.

        Returns:
            The price.
        """

    async def answer(self) -> str:
        """Answer."""

    def untyped(self, name):
        """Take.

        Args:
            name: Its name.
        """

    def undocumented(self, name: str): ...

    def undescribed(self, name: str, count: int):
        """Take.

        Args:
            name: Its name.
        """


def test_public_methods_are_tools_in_the_order_of_their_names():
    assert list(tools_of(Shop())) == ["answer", "buy", "undescribed", "undocumented", "untyped"]


def test_a_schema_is_the_one_of_transformers():
    for method in (Shop().buy, Shop().answer):
        assert schema_of(method) == get_json_schema(method)


@pytest.mark.parametrize(
    ("name", "said"), [("untyped", "Argument name"), ("undocumented", "docstring"), ("undescribed", "'count'")]
)
def test_a_tool_that_cannot_be_described_is_named_with_its_file(name, said):
    with pytest.raises(AgentError, match=rf"test_tools\.py:\d+: Shop\.{name}: .*{said}.*Args:") as caught:
        schema_of(getattr(Shop(), name))
    assert "\n" not in str(caught.value)


def test_a_class_of_a_notebook_and_a_closure_run_in_another_process(tmp_path):
    suffix = "!"

    class Local:
        def reset(self, **row):
            return row["prompt"] + suffix

    def shout(text: str) -> str:
        """Shout.

        Args:
            text: What.
        """
        return text.upper() + suffix

    given = save_objects({"Local": Local, "shout": shout}, tmp_path / "objects.pkl", "environment_factory")
    program = Program({None: given["Local"]}, [given["shout"]])
    with EnvironmentPool(program, Limits(4.0, 60.0, 4096), 1) as pool:
        kind = pool.wait_until_loaded()[None]
        assert (kind.class_name, kind.has_reward, kind.schemas) == ("Local", False, [get_json_schema(shout)])
        pool.begin(0, None, {"prompt": "hello"})
        assert pool.poll(20)[0].observation == "hello!"
        pool.call(0, [("shout", {"text": "a"})])
        assert pool.poll(20)[0].answers == [("A!", False)]


def test_what_cannot_be_pickled_is_refused_by_its_name(tmp_path):
    lock = threading.Lock()

    class Holder:
        held = lock

        def reset(self, **row): ...

    with pytest.raises(AgentError, match=r"environment_factory: holder cannot be sent .*Create it inside the class"):
        save_objects({"holder": Holder}, tmp_path / "objects.pkl", "environment_factory")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Other: ...", r"no 'Game'.* It defines Other"),
        ("class Game: ...", r"environment\.path: Game has no method reset\. Define reset"),
        ("Game = 3", "Game is neither a class nor a function"),
        ("1 / 0", "the file does not run"),
        ("class Game:\n    def __init__(self):\n        1 / 0", r"Game: the class raised ZeroDivisionError.*game\.py:3"),
        ("class Game:\n    def reset(self): ...\n    def go(self, to): ...", r"game\.py:3: Game\.go: "),
        ("import os, threading\nthreading.Thread(target=os._exit, args=(3,)).start()", "exited with code 3"),
    ],
)
def test_an_environment_that_does_not_load_ends_the_start_with_one_error(talk, text, said):
    with pytest.raises(AgentError, match=f"(?s){said}"):
        talk(text).pool.wait_until_loaded()


def test_two_tools_of_one_name_are_refused(talk):
    text = 'class Game:\n    def reset(self): ...\n    def go(self):\n        """Go."""\ndef go():\n    """Go."""\n'
    with pytest.raises(AgentError, match=r"Game\.go and a function of tools have the same name"):
        talk(text, tools=["go"]).pool.wait_until_loaded()
