"""A thousand conversations at once, with tools that go wrong in every way."""

import logging
import time
from collections import Counter

import psutil
import pytest
import torch
from transformers import AutoTokenizer

from tests.agents.test_loop import ENDS, EOS, FORGETS, HERE, Log, check, settings_of, tasks_of
from tests.rewards.processes import wait_until
from tests.rollout.tools import sampling
from tests.worker.test_conversations import batch_of, cut
from tests.worker.test_policy import policy_for
from verl_memopt.agents.loop import ANSWER, FAILED, TOKENS, AgentPlan, build_loop

COUNT, SECONDS, HEAT = 1000, 900, 2.0

logger = logging.getLogger(__name__)


def children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_a_thousand_conversations_end_and_the_update_learns_what_the_engine_sampled(vllm_engine, tied_folder, request):
    settings = settings_of(
        "Rough", multi_turn={"format": f"{HERE / 'world.py'}:rough_calls"}, agent={"tool_timeout_seconds": 5.0}
    )
    tokenizer = AutoTokenizer.from_pretrained(tied_folder)
    tokenizer.chat_template = FORGETS
    before, began = children(), time.monotonic()
    loop = build_loop(settings, AgentPlan({}, False, False), tokenizer, (EOS,), "")
    try:
        with vllm_engine.serving(lambda: time.monotonic() > began + SECONDS) as requests:
            log = Log(requests)
            given = sampling(ignore_eos=False, temperature=HEAT, stop_token_ids=ENDS)
            rows, times = loop.run(tasks_of(COUNT), log, given)
    finally:
        loop.close()
    assert wait_until(lambda: children() <= before)

    assert len(rows) == COUNT
    endings = Counter(each.ended for each in rows)
    assert set(endings) == {ANSWER, TOKENS, FAILED}
    failures = Counter(each.reason.partition(" ")[0] for each in rows if each.ended == FAILED)
    assert set(failures) == {"crash", "hang"}
    last = Counter(tool["name"] for each in rows for tool in each.messages if tool["role"] == "tool")
    assert set(last) == {"echo", "fail", "wait", "flood", "missing", "orphan"}

    ids = [each.ids for each in rows]
    batch = batch_of(ids, torch.arange(COUNT))
    check(rows, log, batch.forest)
    # A conversation that lost its process begins again with the responses that it had, so the engine has sampled nothing else.
    sampled = Counter((tuple(turn.prompt_ids), tuple(turn.output_ids)) for row in ids for turn in row)
    assert Counter((tuple(log.asked[number]), tuple(output.response_ids)) for number, output in log.answered.items()) == sampled

    engine = torch.tensor([value for each in rows for turn in each.turns for value in turn.log_probs])
    policy = policy_for(tied_folder, request.getfixturevalue("one_rank"), 1)
    mini = cut(batch, 4096)
    assert len(mini.micro_batches) > 1
    trained = policy.compute_log_probs(batch, mini.micro_batches, HEAT, False).log_probs
    torch.testing.assert_close(trained, engine, rtol=0, atol=1e-4)
    logger.warning(
        "%.0f s of rollout, %s, %s, %d requests, %d turns, %d nodes, %d tokens computed, %d of turns alone, difference %.1e",
        times.seconds, dict(endings), dict(failures), len(log.asked), sum(map(len, ids)), len(batch.forest.sizes),
        len(batch.forest.tokens), sum(len(turn.prompt_ids) + len(turn.output_ids) for row in ids for turn in row),
        (trained - engine).abs().max(),
    )  # fmt: skip
