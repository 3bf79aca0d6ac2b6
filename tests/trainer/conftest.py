"""A run small enough for a unit test: a tiny model, transformers' own generation, everything in this process."""

import dataclasses
import json
import math
from contextlib import ExitStack, contextmanager, nullcontext

import pytest
import torch

from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import Actor
from verl_memopt.observe.phase import PhaseClock, PhaseMemory
from verl_memopt.rollout.engine import Generation
from verl_memopt.run.interrupts import Interrupts
from verl_memopt.trainer.build import build_learner, build_run
from verl_memopt.trainer.loop import TrainingLoop, start_rewards, start_workers
from verl_memopt.trainer.replay import debug_settings, mode_of
from verl_memopt.trainer.reporter import Reporter
from verl_memopt.trainer.rollouts import RowAnswers, to_batch
from verl_memopt.worker.group import Pending, TimedGroup
from verl_memopt.worker.worker import Reply, Worker

AR = "actor_rollout_ref"
LEAST = {
    "data.max_prompt_length": 12,
    "data.max_response_length": 4,
    "data.train_batch_size": 4,
    "data.seed": 7,
    "algorithm.adv_estimator": "rloo",
    f"{AR}.model.enable_gradient_checkpointing": False,
    f"{AR}.actor.ppo_mini_batch_size": 2,
    f"{AR}.actor.use_dynamic_bsz": True,
    f"{AR}.actor.ppo_max_token_len_per_gpu": 40,
    f"{AR}.actor.optim.lr": 1e-3,
    f"{AR}.actor.fsdp_config.dtype": "fp32",
    f"{AR}.rollout.name": "hf",
    f"{AR}.rollout.n": 2,
    f"{AR}.rollout.dtype": "fp32",
    "trainer.device": "cpu",
    "trainer.worker_group": "local",
    "trainer.logger": ["jsonl"],
    "trainer.track_memory_every_steps": 0,
    "trainer.total_training_steps": 2,
    "trainer.val_before_train": False,
}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 5 / 4
"""


def write_rows(path, count, source="toy/arithmetic"):
    """Write prompts of 4 to 6 characters."""
    rows = [
        {"data_source": source, "prompt": f"{n}+{n + 1}=", "reward_model": {"ground_truth": str(2 * n + 1)}} for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="session")
def run_files(tmp_path_factory, tiny_folder):
    """Files that every run here reads: a model, prompts, and a reward that depends on each answer."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "reward.py").write_text(REWARD)
    return {
        "data.train_files": write_rows(folder / "train.jsonl", 10),
        "data.val_files": write_rows(folder / "val.jsonl", 3),
        f"{AR}.model.path": str(tiny_folder),
        "custom_reward_function.path": str(folder / "reward.py"),
    }


@pytest.fixture
def settled(run_files, tmp_path):
    """Return the settings of the minimal run with some keys changed."""

    def settle(more=None):
        return settings_from_mapping(LEAST | run_files | {"trainer.default_local_dir": str(tmp_path / "run")} | (more or {}))

    return settle


@pytest.fixture(scope="module")
def base_context(run_files, tmp_path_factory):
    return build_run(
        settings_from_mapping(LEAST | run_files | {"trainer.default_local_dir": str(tmp_path_factory.mktemp("base"))})
    )


@pytest.fixture(scope="module")
def base_workers(base_context):
    """A real worker for the module, whose engine has the policy's weights."""
    with start_workers(base_context, PhaseClock()) as workers:
        workers.all("update_weights", Worker.update_weights)
        yield workers


@pytest.fixture
def alike(settled, base_context, base_workers):
    """Return a function that builds a learner on the module's worker, with changed settings of the driver."""
    learners = []

    def build(more=None, workers=base_workers):
        learner = build_learner(dataclasses.replace(base_context, settings=settled(more)), workers, None)
        learners.append(learner)
        return learner

    yield build
    for learner in learners:
        learner.close()


def batch_of(lengths, samples=2):
    responses = [[3 + row] * length for row, length in enumerate(lengths)]
    prompts = [[40 + row] * 3 for row in range(len(lengths))]
    batch = to_batch(RowAnswers([], prompts, Generation(responses, None, []), []), samples, Actor())
    batch.old_log_probs = torch.full((sum(lengths),), -5.0)
    batch.advantages = torch.ones(sum(lengths))
    return batch


_sharing = []
"""What ends the reward processes that the runs of a test module share, and those processes by what they were started for."""


@pytest.fixture(scope="module", autouse=True)
def _shares_rewards():
    with ExitStack() as stack:
        _sharing.append((stack, {}))
        yield
        _sharing.pop()


@contextmanager
def rewards_of(context):
    """The reward processes of a run. Runs of one module with equal settings share them."""
    custom, model = context.settings.custom_reward_function, context.settings.reward_model
    starting = start_rewards(custom, model, context.environment.run_dir)
    if not _sharing:
        with starting as runner:
            yield runner
        return
    (stack, runners), key = _sharing[-1], repr((custom, model))
    if key not in runners:
        runners[key] = stack.enter_context(starting)
    runners[key].stopped = lambda: False
    yield runners[key]


@contextmanager
def ready(settings, begun=None, listener=None):
    """A trainer with running workers. ``begun`` is a group that waits for its workers; None = a new one."""
    clock, settings = PhaseClock(), debug_settings(settings)
    with Interrupts() as interrupts:
        context = build_run(settings)
        with (
            context.lock,
            rewards_of(context) if mode_of(settings).scores else nullcontext() as runner,
            Reporter(context, clock) as reporter,
            start_workers(context, clock, begun) as workers,
        ):
            trainer = TrainingLoop(context, workers, runner, reporter, interrupts, listener)
            try:
                yield trainer
            finally:
                trainer.learner.close()


MEASURED = ("timing_s/", "timing_per_token_ms/", "perf/", "memory/")
"""Beginnings of names of what is measured of a step."""
STARTED = "run_id"
"""Names the start of a run that logged a row; a resumed run has another."""


def learned(run_dir):
    """Return each row of a run without measurements, and without the number of its start."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith((*MEASURED, STARTED))} for row in rows]


def memory(name, host=1, **figures):
    """Return the figures of a phase. Figures that are not named are absent."""
    none = dict.fromkeys(("peak_allocated_bytes", "allocated_bytes", "peak_reserved_bytes", "device_used_bytes"))
    return PhaseMemory(name=name, **{"seconds": 1.0, **none, **figures}, host_rss_bytes=host)


class Member:
    """A stub worker that answers calls and records them."""

    def __init__(self, rank):
        self.rank = rank
        self.asked = []

    def started(self):
        return memory("init")

    def call(self, phase, track, method, *args):
        self.asked.append((phase, track, method, args))
        return Reply(getattr(self, method)(*args), memory(phase))


class Updater(Member):
    """A stub whose updates return figures that depend on its rank."""

    role, norm, partial = "actor", 2.0, ()

    def update_actor(self, minis):
        self.minis = minis
        skipped = 0.0 if math.isfinite(self.norm) else 1.0
        figures = {"loss": 1.0 + self.rank, "grad_norm": self.norm, "lr": 0.5, "skipped_updates": skipped}
        figures |= {"partial_updates": self.partial[self.rank]} if self.partial else {}
        return {f"{self.role}/{name}": value for name, value in figures.items()}

    update_critic = update_actor


class Members:
    """A worker group whose members are objects of this process."""

    def __init__(self, members):
        self.members = members
        self.world_size = len(members)

    def all(self, method, *args):
        return [getattr(member, method)(*args) for member in self.members]

    def each(self, method, arguments):
        return [getattr(member, method)(*own) for member, own in zip(self.members, arguments, strict=True)]

    def shutdown(self):
        self.members = []


class Apart(Members):
    """Members with devices of their own: a call runs when its result is asked for, and is listed in ``begun`` before."""

    def __init__(self, members):
        super().__init__(members)
        self.begun = []

    def begin(self, method, arguments):
        self.begun.append(arguments[0][0])
        return Pending(lambda: self.each(method, arguments))


def group_of(*members):
    return TimedGroup(Members(members), PhaseClock(), in_process=True)
