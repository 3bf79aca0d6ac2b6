"""The loop on several ranks: processes joined by gloo stand in for Ray's, and rank 0 is the driver too."""

import functools
import json
from contextlib import ExitStack
from types import MappingProxyType

import pytest
import torch.distributed as dist

from tests.critics import with_value_head
from tests.memory.limits.test_recutting import out_of_memory
from tests.ranks import run_ranks
from tests.rlt import brief_toy, values_of
from tests.trainer.conftest import AR, LEAST, learned, ready
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.worker.group import LOOPBACK, Placement


class Ranks:
    """A worker group whose members are the ranks of the default process group. Its methods are called on rank 0."""

    def __init__(self):
        self.rank, self.world_size, self.worker = dist.get_rank(), dist.get_world_size(), None

    pools = MappingProxyType({})

    def build(self, factory, pool_factories):
        assert not pool_factories
        self.each("build", [(factory,)] * self.world_size)
        return self

    def check_nodes(self, paths, run_dir):
        """All ranks are on this machine."""

    def all(self, method, *args):
        return self.each(method, [args] * self.world_size)

    def each(self, method, arguments):
        dist.broadcast_object_list([(method, arguments)])
        return self._answer(method, arguments)

    def shutdown(self):
        dist.broadcast_object_list([None])

    def serve(self):
        """Answers the calls of rank 0 until it shuts the group down."""
        while True:
            called = [None]
            dist.broadcast_object_list(called)
            if called[0] is None:
                return
            self._answer(*called[0])

    def _answer(self, method, arguments):
        if method == "build":
            place = Placement(self.rank, self.world_size, self.rank, LOOPBACK, 0, "cpu")
            value, self.worker = None, arguments[self.rank][0](place)
        elif method == "close":  # which would leave the process group, and the next run needs it
            value, self.worker = None, None
        else:
            value = getattr(self.worker, method)(*arguments[self.rank])
        answers = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, answers)
        return answers


class ShortRanks(Ranks):
    """Ranks of which the second runs out of memory once in each of its models."""

    def __init__(self):
        super().__init__()
        self.failing = ExitStack()

    def _answer(self, method, arguments):
        answers = super()._answer(method, arguments)
        if method == "build" and self.rank == 1:
            worker = self.worker
            roles = (worker.policy, worker.critic, worker.role)
            models = {role.model for role in roles if role is not None}
            for model in models | ({worker.reference} - {None}):
                self.failing.enter_context(out_of_memory(model, 1))
        return answers


def run_each(rank, runs, ranks=Ranks):
    """Takes the steps of each run on all ranks."""
    for values in runs:
        group = ranks()
        if rank:
            group.serve()
        else:
            with ready(settings_from_mapping(values), group) as trainer:
                trainer.run()


LOSSES = ("actor/loss", "actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "critic/score/mean")


def assert_same_steps(run_dir, expected_dir, steps):
    found, expected = ({row["step"]: row for row in learned(folder)} for folder in (run_dir, expected_dir))
    for step in steps:
        names = [name for name in LOSSES if name in expected[step]]
        assert "actor/grad_norm" in names
        for name in names:
            assert found[step][name] == pytest.approx(expected[step][name], rel=1e-4, abs=1e-6), (step, name)


@pytest.fixture(scope="module")
def algorithms(run_files, untied_folder, tmp_path_factory):
    """Returns a function from the name of an algorithm to the keys of a run, for any number of ranks."""
    quiet = {"trainer.total_training_steps": 2, "trainer.save_freq": -1, "trainer.test_freq": -1, "data.val_files": None}
    least = {**LEAST, **run_files, **quiet, f"{AR}.rollout.n": 4}

    @functools.cache
    def keys(name):
        if name == "rlt":
            return values_of(brief_toy(tmp_path_factory.mktemp("rlt")), "", {**quiet, f"{AR}.rollout.n": 4})
        if name == "rloo":
            return least
        critic = {"model.fsdp_config.dtype": "fp32", "ppo_max_token_len_per_gpu": 40}
        critic["model.path"] = str(with_value_head(untied_folder, tmp_path_factory.mktemp("valued")))
        return {**least, "algorithm.adv_estimator": "gae", **{f"critic.{key}": value for key, value in critic.items()}}

    return keys


ALL = ("rloo", "ppo", "rlt")


SIZE = "fsdp_config.ulysses_sequence_parallel_size"


def on(ranks, sharing, **more):
    """Returns the keys of a run on some ranks, of which ``sharing`` neighbours share the tokens of a micro-batch."""
    sizes = {f"{section}.{SIZE}": sharing for section in (f"{AR}.actor", "critic.model", "reward_model.model")}
    return {"trainer.worker_group": "ray", "trainer.n_gpus_per_node": ranks, **sizes, **more}


def run_on_one(values, run_dir, **more):
    with ready(settings_from_mapping({**values, "trainer.default_local_dir": str(run_dir), **more})) as trainer:
        trainer.run()


def assert_trains_as_one_does(named, tmp_path, ranks, sharings, steps, **more):
    runs, pairs = [], []
    for name, values in named.items():
        length = {"trainer.total_training_steps": steps}
        run_on_one(values, tmp_path / name, **length)
        for sharing in sharings:
            run_dir = tmp_path / f"{name}_{ranks}_{sharing}"
            runs.append({**values, **on(ranks, sharing), **length, **more, "trainer.default_local_dir": str(run_dir)})
            pairs.append((run_dir, tmp_path / name))
    run_ranks(run_each, ranks, runs, timeout=400)
    for run_dir, expected in pairs:
        assert_same_steps(run_dir, expected, range(1, steps + 1))


def batch(prompts, samples, mini):
    """Returns the keys of steps of so many prompts and answers to each, with so many prompts in a mini-batch."""
    sizes = {"data.train_batch_size": prompts, f"{AR}.rollout.n": samples, f"{AR}.actor.ppo_mini_batch_size": mini}
    return sizes | {"trainer.balance_batch": mini > 1}


def test_two_ranks_with_unequal_shares_train_as_one_does(algorithms, tmp_path):
    """15 answers to 3 or 5 prompts, mini-batches of 5 or all, and a step of one answer, which leaves a rank without any."""
    kl = {f"{AR}.actor.use_kl_loss": True, f"{AR}.actor.loss_agg_mode": "seq-mean-token-mean"}
    cases = {
        "ppo": algorithms("ppo") | batch(3, 5, 1),
        "rloo": algorithms("rloo") | batch(5, 3, 5) | kl,
        "alone": algorithms("ppo") | batch(1, 1, 1),
    }
    assert_trains_as_one_does(cases, tmp_path, 2, [1], 2)


def test_two_ranks_that_share_tokens_train_as_one_does(algorithms, tmp_path):
    assert_trains_as_one_does({"ppo": algorithms("ppo")}, tmp_path, 2, [2], 2)


@pytest.mark.parametrize(
    "name", ["ppo", pytest.param("rloo", marks=pytest.mark.slow), pytest.param("rlt", marks=pytest.mark.slow)]
)
def test_a_run_on_two_ranks_of_which_one_runs_out_of_memory_trains_as_one_does(algorithms, tmp_path, name):
    values = algorithms(name)
    run_on_one(values, tmp_path / "one")
    short = {**values, **on(2, 1), f"{AR}.actor.adaptive_token_budget": True, "trainer.default_local_dir": str(tmp_path / "two")}
    run_ranks(run_each, 2, [short], ShortRanks, timeout=400)
    assert_same_steps(tmp_path / "two", tmp_path / "one", (1, 2))
    rows = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    # Once in each model: the policy's, and the critic's, or the reference's and the student's.
    retries = sum(value for row in rows for key, value in row.items() if key.startswith("perf/") and key.endswith("_retries"))
    assert retries == {"ppo": 2, "rloo": 1, "rlt": 3}[name]


def test_two_ranks_that_compute_with_the_weights_of_their_engines_train_as_one_does(algorithms, tmp_path):
    """The critic stays one that FSDP2 shards."""
    assert_trains_as_one_does({"ppo": algorithms("ppo")}, tmp_path, 2, [1], 2, **{f"{AR}.rollout.share_weights": True})


@pytest.mark.slow
def test_any_algorithm_takes_its_steps_on_two_ranks_with_the_weights_of_their_engines(algorithms, tmp_path):
    assert_trains_as_one_does(
        {name: algorithms(name) for name in ALL}, tmp_path, 2, [1, 2], 5, **{f"{AR}.rollout.share_weights": True}
    )


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sharings"), [(2, [1, 2]), (4, [1, 2])])
def test_any_ranks_take_the_five_steps_of_one(algorithms, tmp_path, ranks, sharings):
    assert_trains_as_one_does({name: algorithms(name) for name in ALL}, tmp_path, ranks, sharings, 5)


@pytest.mark.slow
def test_a_run_that_two_ranks_saved_goes_on_with_four_and_with_one(algorithms, tmp_path):
    for name in ALL:
        values = algorithms(name)
        saving = {"trainer.save_freq": 2, "trainer.default_local_dir": str(tmp_path / name)}
        run_on_one(values, tmp_path / f"{name}_whole", **{"trainer.total_training_steps": 4})
        run_ranks(run_each, 2, [{**values, **on(2, 2), **saving}], timeout=400)
        for ranks in (4, 1):
            resumed = {
                **values, **(on(4, 2) if ranks == 4 else {}), "trainer.default_local_dir": str(tmp_path / f"{name}_{ranks}"),
                "trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(tmp_path / name / "global_step_2"),
                "trainer.total_training_steps": 4,
            }  # fmt: skip
            run_ranks(run_each, 4, [resumed], timeout=400) if ranks == 4 else run_on_one(resumed, tmp_path / f"{name}_1")
            assert_same_steps(tmp_path / f"{name}_{ranks}", tmp_path / f"{name}_whole", (3, 4))
