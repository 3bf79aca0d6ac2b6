import time
from collections import defaultdict

import pytest

from tests.rollout.conftest import (  # noqa: F401 - one engine for the tests of this folder
    engine,
    hf_engine,
    no_shared_engine,
    one_rank,
    shared_vllm,
    tied_folder,
    vllm_engine,
)
from verl_memopt.agents.environments import EnvironmentPool, Failed, Finished, Restart
from verl_memopt.agents.program import Program
from verl_memopt.agents.tools import Source
from verl_memopt.rewards.score import Limits

GAME = '''
import asyncio, os, re, threading, time

made = 0

class Game:
    """Counts, and has one way to go wrong for each limit."""

    def __init__(self):
        global made
        made += 1
        self.made, self.threads, self.meeting = made, [threading.get_ident()], asyncio.Event()

    def reset(self, prompt="", seed=None, **row):
        self.total, self.seed, self.row = 0, seed, row
        self.threads.append(threading.get_ident())
        return f"ready {prompt}" if prompt else None

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: The number.
        """
        self.threads.append(threading.get_ident())
        time.sleep(0.05 / number)
        self.total += number
        return self.total

    async def wait(self) -> str:
        """Wait for the other."""
        await self.meeting.wait()
        return "met"

    async def meet(self) -> str:
        """Let the other go on."""
        self.meeting.set()
        return "set"

    async def sleep(self, seconds: float) -> str:
        """Sleep.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return "slept"

    def nap(self, seconds: float) -> str:
        """Sleep in a thread.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "slept"

    def text(self, length: int) -> str:
        """Answer with a long text.

        Args:
            length: Of the text.
        """
        return "a" + "." * (length - 2) + "z"

    def lose(self) -> str:
        """Lose."""
        raise ValueError("Game over.")

    def leave(self) -> str:
        """Leave."""
        raise SystemExit("left")

    def fork(self) -> str:
        """Fork."""
        return os.fork()

    async def fork_async(self) -> str:
        """Fork."""
        return os.fork()

    def names(self) -> str:
        """Tell names, in the order of a set."""
        # From a list: a set that stands in the code is filled in another order by who compiles it than by who reads the bytecode.
        return " ".join(set("Ada Alan Edsger Grace John Kurt".split()))

    def pid(self) -> str:
        """Process id."""
        return str(os.getpid())

    def crash(self) -> str:
        """Crash."""
        os._exit(3)

    async def crash_async(self) -> str:
        """Crash."""
        os._exit(3)

    def hang(self) -> str:
        """Hang."""
        time.sleep(1000)

    async def hang_async(self) -> str:
        """Hang, and refuse to be cancelled."""
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass

    async def block(self) -> str:
        """Block the event loop."""
        time.sleep(1000)

    def hold(self) -> str:
        """Hold Python's lock."""
        re.match("(a+)+$", "a" * 40 + "b")

    def flood(self) -> str:
        """Print without end."""
        while True:
            print("." * 1000)

    def burn(self) -> str:
        """Compute without end."""
        while True:
            pass

    def take_memory(self) -> str:
        """Take more memory than there is."""
        self.held = bytearray(2**40)

    def close_all(self) -> str:
        """Close the files of the process."""
        os.closerange(3, 1000)

    def get_reward(self):
        return self.total
'''


class Talk:
    """Waits for the events of conversations of a pool."""

    def __init__(self, pool):
        self.pool, self.events, self.live = pool, defaultdict(list), set()

    def next(self, conversation, seconds=100):
        deadline = time.monotonic() + seconds
        while not self.events[conversation]:
            assert time.monotonic() < deadline, f"nothing comes for {conversation}"
            for event in self.pool.poll(1):
                self.events[event.conversation].append(event)
        event = self.events[conversation].pop(0)
        (self.live.discard if isinstance(event, Failed | Finished | Restart) else self.live.add)(conversation)
        return event

    def begin(self, conversation, name=None, seed=None, **row):
        self.pool.begin(conversation, name, row, seed)
        return self.next(conversation)

    def call(self, conversation, name, **arguments):
        self.pool.call(conversation, [(name, arguments)])
        return self.next(conversation)

    def finish(self, conversation):
        self.pool.finish(conversation)
        return self.next(conversation)

    def finish_again(self, conversation):
        """Finish a conversation, which begins again first if it has ended, or has lost its environment."""
        while True:
            if not self.events[conversation]:
                if conversation in self.live:
                    self.pool.finish(conversation)
                else:
                    self.pool.begin(conversation, None, {})
            if isinstance(event := self.next(conversation), Finished):
                return event


@pytest.fixture
def talk(tmp_path):
    pools = []

    def make(text=GAME, name="Game", num_workers=1, memory_gb=4.0, cpu_seconds=60.0, tools=(), **program):
        (tmp_path / "game.py").write_text(text)
        path = str(tmp_path / "game.py")
        names = {None: name} if isinstance(name, str) else name
        environments = {key: Source(path, value, "environment.path") for key, value in names.items()}
        given = Program(environments, [Source(path, tool, "tools.path") for tool in tools], "environment", **program)
        pools.append(EnvironmentPool(given, Limits(memory_gb, cpu_seconds, 4096, "environment"), num_workers, tmp_path / "logs"))
        return Talk(pools[-1])

    yield make
    for pool in pools:
        pool.close()
