"""The bytes of passes over conversations: by the formulas, and counted in updates and log-prob passes on a CPU."""

import json
import random

import pytest
import torch

from benchmarks.gpu.reach_cases import size_of
from benchmarks.tree_update import Talk, beginning_alike, branching, ids, straight, thinking
from tests.ladder.test_measure import SHAPE as LADDER
from tests.memory import activation_cases as act
from tests.plan.runs import AR, DYNAMIC, said, settings_of
from tests.worker.test_conversations import HEAT, batch_of, cut
from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import ActorRolloutRef
from verl_memopt.model.forest import Turn, build_forest
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.observe.device_ledger import fsdp_kinds
from verl_memopt.plan.conversations import assumptions, forest_passes, open_tokens
from verl_memopt.plan.held import Held
from verl_memopt.plan.peaks import Sizes, predict

SLOW = pytest.mark.slow
SIZE = Talk(prompt=64, answer=16, tool=12)
TALKS = {
    "each turn goes on": lambda draw: straight(draw, SIZE, 4, 6),
    "each turn forks": lambda draw: thinking(draw, SIZE, 4, 6),
    "prompts begin alike": lambda draw: beginning_alike(draw, SIZE, 3, 2),
    "some answers go on": lambda draw: branching(draw, SIZE, 8, 3),
}
WHOLE = 10**6
"""A budget that takes all conversations at once."""


@pytest.fixture(scope="module", params=[LADDER, pytest.param(act.SHAPE, marks=SLOW)], ids=["ladder", "deep"])
def shape(request):
    return request.param


@pytest.fixture(scope="module")
def folder(shape, tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("talks") / "model", shape)


def batch_for(talk):
    rows = TALKS[talk](random.Random(0))
    return batch_of(rows, torch.zeros(len(rows), dtype=torch.int64))


def counted(policy, run):
    """Return the most live bytes of a run, with those of weights."""
    with ByteTracker() as tracker, fsdp_kinds():
        tracker.mark("params", [*policy.model.parameters(), *policy.model.buffers()])
        tracker.enter("run")
        run()
        peak = tracker.peaks[DEVICE].bytes
        policy.trained.optimizer.zero_grad(set_to_none=True)
    return peak


def held_of(shape, **model):
    keys = {f"model.{key}": value for key, value in model.items()}
    own = {"actor.fsdp_config.dtype": "fp32", "actor.fsdp_config.model_dtype": "fp32", "actor.use_torch_compile": False}
    return Held("policy", replaced(ActorRolloutRef(), {**own, **keys}), size_of(shape), 1, "cpu", trained=True)


def passes_of(mini, budget, learns):
    alone = len(mini.micro_batches) == 1
    forests = [mini.batch.select(list(rows)).forest for rows in mini.micro_batches]
    whole = [forest.select(torch.arange(len(forest.place))) for forest in forests]
    return [own for forest in whole for own in forest_passes(forest, budget, learns, alone)]


def most(peaks):
    return max(sum(kinds.values()) for kinds in peaks)


CASES = [
    ("each turn goes on", WHOLE), ("each turn forks", WHOLE), ("prompts begin alike", WHOLE), ("each turn goes on", 256),
    ("prompts begin alike", 1024), ("some answers go on", 200), pytest.param("some answers go on", WHOLE, marks=SLOW),
    pytest.param("each turn forks", 80, marks=SLOW), pytest.param("prompts begin alike", 300, marks=SLOW),
]  # fmt: skip
"""Conversations and token budgets. With the smaller budgets a path stays open, except where each turn goes on."""


@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(("talk", "budget"), CASES)
def test_an_update_and_a_pass_for_log_probs_hold_what_the_formula_says(folder, shape, one_rank, checkpoints, talk, budget):
    policy = act.build(folder, one_rank, recompute=checkpoints, recompute_elementwise=True, logprob_chunk_tokens=64)
    batch, held = batch_for(talk), held_of(shape, enable_gradient_checkpointing=checkpoints, logprob_chunk_tokens=64)
    mini = cut(batch, budget)
    passes = {learns: passes_of(mini, budget, learns) for learns in (True, False)}
    assert any(own.forest.held for own in passes[True]) == (budget < WHOLE and talk != "each turn goes on")
    assert all(own.tokens <= budget for own in passes[True])
    update = counted(policy, lambda: policy.trained.forward_backward(mini, policy.loss_at(HEAT)))
    log_probs = counted(policy, lambda: policy.compute_log_probs(batch, mini.micro_batches, HEAT, False))
    assert most(held.update(own, True) for own in passes[True]) == pytest.approx(update, rel=0.05)
    assert most(held.forward(own) for own in passes[False]) == pytest.approx(log_probs, rel=0.05)


def forest_of(rows):
    forest = build_forest(rows, merge_cost=0)
    return forest.select(torch.arange(len(forest.place)))


def test_answers_to_one_prompt_are_a_forest_of_depth_one():
    prompt, answers = list(range(40)), [[100 + row] * 8 for row in range(3)]
    (own,) = forest_passes(forest_of([[Turn(prompt, answer)] for answer in answers]), WHOLE, alone=True)
    # The last token of each answer is not computed, and the last block has the prompt's last token and the answers.
    assert (own.tokens, own.responses, own.alone) == (40 + 3 * 7, 24, True)
    # The first answer and the prompt are one segment. The other two answers see the prompt by one span.
    assert (own.rows, own.forest.run) == (3, 47)
    assert (own.forest.skipped, own.forest.span, own.forest.round) == (39, (14, 40), (14, 40))
    assert (own.forest.held, own.forest.read) == (0, 0)


def test_the_passes_below_an_open_path_follow_from_the_shape_of_the_forest():
    # A prompt of 30 tokens below which 3 conversations have 20 computed tokens each, and 40 tokens fit in a pass.
    rows = [[Turn([*range(30)], [50 + row] * 21)] for row in range(3)]
    opened, *runs, closed = forest_passes(forest_of(rows), 40)
    assert (opened.tokens, opened.responses, opened.forest.opens, opened.forest.states) == (30, 0, True, 1)
    assert [(own.tokens, own.responses, own.forest.read, own.forest.held) for own in runs] == [(40, 42, 30, 30), (20, 21, 30, 30)]
    # Sums of gradients exist from the first backward on.
    assert [own.forest.summed for own in (opened, *runs, closed)] == [0, 0, 30, 30]
    assert (closed.tokens, closed.forest.closes, closed.forest.read, closed.forest.held) == (30, True, 0, 30)
    assert [own.forest.closes for own in forest_passes(forest_of(rows), 40, learns=False)] == [False] * 3


# What a run may have.

TOOLS = f"{AR}.rollout.agent.tools.path=tools.py"
CAP, ROWS = f"{AR}.actor.ppo_max_token_len_per_gpu", f"{AR}.actor.ppo_micro_batch_size_per_gpu"
TURNS = f"{AR}.rollout.multi_turn.max_assistant_turns"
PHASES = ("old_log_prob", "update_actor")


def run_of(folder, *more):
    own = (f"{AR}.model.path={folder}", "trainer.device=cpu", f"{AR}.actor.ppo_mini_batch_size=4", f"{AR}.rollout.name=hf")
    fp32 = (f"{AR}.actor.fsdp_config.dtype=fp32", f"{AR}.rollout.dtype=fp32", f"{AR}.actor.use_torch_compile=false")
    lengths = ("data.max_prompt_length=96", "data.max_response_length=160", "data.train_batch_size=4", f"{AR}.rollout.n=2")
    return settings_of(*own, *fp32, *lengths, *more)


def totals(folder, *more):
    return predict(run_of(folder, *more), Sizes(size_of(TinyShape())), PHASES, "cpu").totals


def going_back(draw, size, conversations, turns):
    """Conversations in which each turn keeps only the prompt of what came before, so that no other tokens are shared."""
    prompt = ids(draw, size.prompt)
    rows = [[([*prompt, *ids(draw, size.tool)], ids(draw, size.answer)) for _ in range(turns)] for _ in range(conversations)]
    return [[Turn(*turn) for turn in row] for row in rows]


@pytest.mark.parametrize("checkpointing", ["true", "false"])
@pytest.mark.parametrize("cap", [256, 400])
def test_no_conversations_within_the_limits_need_more_than_is_predicted_for_the_run(tiny_folder, checkpointing, cap):
    checkpoints = f"{AR}.model.enable_gradient_checkpointing={checkpointing}"
    settings, size = run_of(tiny_folder, TOOLS, DYNAMIC, f"{CAP}={cap}", checkpoints), size_of(TinyShape())
    predicted = predict(settings, Sizes(size), PHASES, "cpu").phases
    held = Held("policy", settings.actor_rollout_ref, size, 1, "cpu", trained=True)
    draw, opened = random.Random(0), 0
    for _ in range(20):
        talk = draw.choice([straight, thinking, going_back])
        lengths = Talk(draw.randint(8, 96), draw.randint(4, 150 if talk is going_back else 30), draw.randint(1, 10))
        rows = talk(draw, lengths, 8, draw.randint(1, 4))
        mini = cut(batch_of(rows, torch.zeros(8, dtype=torch.int64)), cap)
        updates, passes = passes_of(mini, cap, True), passes_of(mini, cap, False)
        opened += any(own.forest.held for own in updates)
        own = most(held.forward(own) for own in passes), most(held.update(own, True) for own in updates)
        for phase, num_bytes in zip(PHASES, own, strict=True):
            assert num_bytes <= sum(predicted[phase].values()) - predicted[phase].get("optimizer", 0), phase
    assert opened


def test_what_is_predicted_of_a_run_with_tools_follows_from_what_its_settings_bound(tiny_folder):
    # 8 conversations of at most 256 tokens are 2,048 if no turn forks, of which 300 are in a micro-batch.
    by_tokens = DYNAMIC, f"{CAP}=300"
    single, talks = totals(tiny_folder, *by_tokens), totals(tiny_folder, TOOLS, *by_tokens)
    assert all(talks[phase] > single[phase] for phase in PHASES)
    # Turns that are known to be few never exceed a micro-batch, so no path is kept open.
    one, two = (totals(tiny_folder, TOOLS, *by_tokens, f"{TURNS}={turns}") for turns in (1, 2))
    assert one["update_actor"] < two["update_actor"] == talks["update_actor"]
    assert open_tokens(run_of(tiny_folder, TOOLS, *by_tokens), "actor") == 256
    assert [open_tokens(run_of(tiny_folder, TOOLS, *by_tokens, f"{TURNS}={turns}"), "actor") for turns in (1, 2)] == [0, 256]
    # A micro-batch of rows that may fork in each turn has more tokens with more turns.
    by_rows = f"{ROWS}=2", f"{AR}.rollout.log_prob_micro_batch_size_per_gpu=2"
    few, many = (totals(tiny_folder, TOOLS, *by_rows, f"{TURNS}={turns}") for turns in (1, 3))
    assert few["update_actor"] < many["update_actor"]


LONG = [
    *("data.max_prompt_length=1024", "data.max_response_length=3072", "data.train_batch_size=8"),
    *(f"{AR}.model.path=Qwen/Qwen3-0.6B", f"{AR}.actor.ppo_mini_batch_size=8"),
]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            [DYNAMIC, f"{CAP}=9000"],
            ["any number of turns", "4,096 tokens", "9,000 computed tokens", "up to 4,096 tokens are kept"],
        ),
        ([DYNAMIC, f"{CAP}=9000", f"{TURNS}=2"], ["at most 2 turns", "9,000 computed tokens"]),
        ([f"{ROWS}=2"], ["any number of turns", "goes on where it ended", "use_dynamic_bsz=true"]),
        ([f"{ROWS}=2", f"{TURNS}=3"], ["at most 3 turns", "each turn may fork"]),
    ],
)
def test_a_prediction_says_what_it_assumes_about_conversations(more, told):
    assumed = assumptions(settings_of(*LONG, TOOLS, *more))
    assert all(words in assumed for words in told)
    assert ("are kept" in assumed) == ("up to 4,096 tokens are kept" in told)


def test_fit_shows_what_is_assumed_of_a_run_with_tools_only(capsys):
    run = (*LONG, DYNAMIC, f"{CAP}=9000")
    _, shown = said(capsys, "--memory", "80", *run, TOOLS)
    assert "Conversations of any number of turns" in " ".join(shown.split())
    found = [json.loads(said(capsys, "--memory", "80", "--json", *run, *more)[1]) for more in ([], [TOOLS])]
    assert [type(own["conversations"]) for own in found] == [type(None), str]
    single, talks = (own["phases"]["update_actor"] for own in found)
    assert talks["activations"] > single["activations"]
    assert talks["params"] == single["params"]
