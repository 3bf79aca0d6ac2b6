"""``python -m benchmarks.agent_rollout``: how busy the engine is while tools wait, beside a loop in lock-step.

Conversations have up to eight turns of some thirty tokens, and each turn but the last calls a tool that sleeps. The agent loop
generates for some conversations while others wait. The lock-step loop generates the turns of all, then runs all tools at once,
and so on. Both give the same conversations, token by token. The model has random weights, and enough layers that generation on a
CPU takes as long as the tools.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.common import CPU, load, processor, text_table
from verl_memopt.agents.conversation import Transcript
from verl_memopt.agents.loop import AgentLoop, AgentPlan, Task, build_loop
from verl_memopt.config.agent_settings import Agent, AgentTools, MultiTurn
from verl_memopt.config.schema import Rollout
from verl_memopt.data.encoder import decode
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.rollout.engine import EnginePlace, RolloutEngine, SamplingSettings, build_engine, row_seed

SHAPE = TinyShape(hidden_size=256, intermediate_size=768, num_layers=8, num_heads=4, num_kv_heads=2, max_positions=1024)
EOS, STOPS = 2, tuple(range(100, 110))
"""Tokens that end a turn: so many of the vocabulary that a turn has some thirty tokens."""
SAMPLING = SamplingSettings(1.0, -1, 1.0, 1.0, True, 96, False, True, stop_token_ids=STOPS)
HEAD = ("loop", "seconds", "engine busy", "turns", "sampled tokens", "tokens / s")
TEMPLATE = "{%- for message in messages -%}{{- message.content -}}{%- endfor -%}"
TOOLS = '''
import time
from zlib import crc32

def calls(text):
    """Call the tool, except after about one text in six."""
    return [("sleep", {"text": text[:4]})] if crc32(text.encode()) % 6 else []

def sleep(text: str) -> str:
    """Sleep, and repeat a text.

    Args:
        text: The text.
    """
    time.sleep(SECONDS)
    return text
'''


def lock_step(loop: AgentLoop, tasks: Sequence[Task], engine: RolloutEngine) -> tuple[Any, float, float]:
    """Return the ids of each conversation's turns, the seconds, and those in which the engine generated."""
    assert loop.pool is not None
    began, busy = time.monotonic(), 0.0
    talks = [Transcript(loop.tokenizer, list(task.messages), {}) for task in tasks]
    turns: list[list[tuple[list[int], list[int]]]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        loop.pool.begin(number, None, task.row, task.seed)
    live = wait_for(loop, len(tasks))
    while live:
        numbers = sorted(live)
        prompts = [talks[number].prompt() for number in numbers]
        seeds = [row_seed(tasks[number].seed, len(turns[number]) + 1, 0, 0) for number in numbers]
        before = time.monotonic()
        made = engine.generate(prompts, seeds, SAMPLING)
        busy += time.monotonic() - before
        waiting = 0
        for number, prompt, output, reason in zip(numbers, prompts, made.response_ids, made.finish_reasons, strict=True):
            turns[number].append((prompt, output))
            text = decode(loop.tokenizer, [token for token in output if token not in loop.stops])
            called = loop.parser(text, ()).calls
            talks[number].add_output(output, {"role": "assistant", "content": text}, text)
            if reason == "stop" and called and len(turns[number]) < (loop.multi_turn.max_assistant_turns or 0):
                loop.pool.call(number, [(call.name, dict(call.arguments)) for call in called])
                waiting += 1
            else:
                loop.pool.abandon(number)
        live = wait_for(loop, waiting)
        for number, event in live.items():
            talks[number].messages.append({"role": "tool", "content": event.answers[0][0]})
    return turns, time.monotonic() - began, busy


def wait_for(loop: AgentLoop, count: int) -> dict[int, Any]:
    assert loop.pool is not None
    events: dict[int, Any] = {}
    while len(events) < count:
        events |= {event.conversation: event for event in loop.pool.poll(1.0)}
    return events


def rounds(loop: AgentLoop, engine: RolloutEngine, count: int, repeats: int) -> list[list[str]]:
    tasks = [Task([{"role": "user", "content": f"{number}?"}], {}, None, {}, number, str(number)) for number in range(count)]
    measured: dict[str, list[tuple[float, float]]] = {"agent loop": [], "lock-step": []}
    for _ in range(repeats):
        with engine.serving() as requests:
            talks, times = loop.run(tasks, requests, SAMPLING)
        turns, seconds, busy = lock_step(loop, tasks, engine)
        found = [[(turn.prompt_ids, turn.output_ids) for turn in talk.turns] for talk in talks]
        assert found == turns, "the two loops must give the same conversations"
        measured["agent loop"].append((times.seconds, times.engine_seconds / times.seconds))
        measured["lock-step"].append((seconds, busy / seconds))
    sampled, lines = sum(len(output) for row in turns for _, output in row), []
    for name, figures in measured.items():
        seconds, busy = (median(column) for column in zip(*figures, strict=True))
        facts = f"{sum(map(len, turns))}", f"{sampled:,}", f"{sampled / seconds:.0f}"
        lines.append([name, f"{seconds:.1f}", f"{busy:.0%}", *facts])
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agent_rollout", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rollouts of each loop (default: 3)")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--tool-seconds", type=float, default=0.2)
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder, file = str(make_tiny_model(Path(name) / "model", SHAPE)), Path(name) / "tools.py"
        file.write_text(TOOLS.replace("SECONDS", str(asked.tool_seconds)))
        settings = Rollout(
            name="vllm", prompt_length=64, response_length=900, dtype="fp32", kv_cache_memory_gb=0.5, enforce_eager=True,
            load_format="auto", max_num_seqs=asked.conversations, stop_token_ids=list(STOPS),
            multi_turn=MultiTurn(format=f"{file}:calls", max_assistant_turns=8),
            agent=Agent(tools=AgentTools(str(file), ["sleep"]), num_workers=1),
        )  # fmt: skip
        engine = build_engine(settings, EnginePlace(0, 1, 0, 1, CPU, folder, folder, False, (EOS,)))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = TEMPLATE
        loop = build_loop(settings, AgentPlan({}, False, False), tokenizer, (EOS,), "")
        try:
            lines = rounds(loop, engine, asked.conversations, asked.rounds)
        finally:
            loop.close()
            engine.shutdown()
    print(text_table(HEAD, lines))
    print(f"\n{asked.conversations} conversations, tools sleep {asked.tool_seconds} s, {processor()}, one thread, load {load()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
