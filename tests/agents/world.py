"""Tools that fail, wait and flood, for conversations of a model with random weights. Its text decides which tool it calls."""

import os
import time
from zlib import crc32

TOOLS = ("echo", "fail", "wait", "flood", "missing", "echo", None, None)


def calls(text):
    """One call of a tool, or none, by the characters of the text."""
    name = TOOLS[sum(map(ord, text)) % len(TOOLS)]
    return [] if name is None else [(name, {"text": text[:4]} if name in ("echo", "missing") else {})]


def rough_calls(text):
    """Seldom a call that ends, blocks or outlives its process, and otherwise one of those above."""
    number = crc32(text.encode()) % (len(ROUGH) * 150)
    return [(ROUGH[number], {})] if number < len(ROUGH) else calls(text)


ROUGH = ("crash", "hang", "orphan")


class World:
    """Counts its calls."""

    def reset(self, **row):
        self.count = 0
        return f" {row['number'] % 7}"

    def echo(self, text: str) -> str:
        """Repeat a text.

        Args:
            text: The text.
        """
        self.count += 1
        return text

    def fail(self) -> str:
        """Always fail."""
        raise ValueError("as always")

    def wait(self) -> str:
        """Answer late."""
        time.sleep(0.02)
        return "late"

    def flood(self) -> str:
        """Answer with far too much."""
        return "x" * 100_000

    def get_reward(self) -> float:
        return float(self.count)


class Rough(World):
    """Has tools that harm their process."""

    def crash(self) -> str:
        """End the process."""
        os._exit(3)

    def hang(self) -> str:
        """Never answer."""
        time.sleep(1000)

    def orphan(self) -> str:
        """Leave a process behind that has all files of this one."""
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
        return "left"
