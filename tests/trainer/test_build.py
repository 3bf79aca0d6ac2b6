import re
from dataclasses import replace

import pytest

from tests.trainer.conftest import AR, write_rows
from verl_memopt.errors import CheckpointError, ConfigError, DataError
from verl_memopt.model.weights import load_model_config
from verl_memopt.run.checkpoints import CheckpointStore
from verl_memopt.run.resume import kept_settings, plain_shapes
from verl_memopt.trainer.build import build_run


def leave_checkpoint(settings, step, **state):
    """Leave a checkpoint as a run of these settings would, but without weights."""
    context = build_run(settings)
    for _ in range(step):
        context.loader.next_indices()
    store = CheckpointStore(context.environment.run_dir, None)
    store.begin(step)
    kept = {
        "settings": kept_settings(context.settings),
        "weights": plain_shapes(context.environment.weights),
        "token_budgets": {},
    }
    return store.commit(step, {"seed": context.settings.data.seed, "loader": context.loader.state_dict() | state, **kept}, 1)


def test_steps_are_epochs_times_whole_batches_unless_given_and_validation_needs_a_file(settled):
    assert build_run(settled({"trainer.total_training_steps": None, "trainer.total_epochs": 3})).total_steps == 6  # 10 rows by 4
    assert build_run(settled({"trainer.total_training_steps": 5, "trainer.total_epochs": 3})).total_steps == 5
    assert build_run(settled({"data.val_files": None})).validation is None
    context = build_run(settled())
    assert (len(context.validation), context.checkpoint, context.total_steps) == (3, None, 2)
    assert context.encoder.max_prompt_length == 12


def test_a_resumed_run_goes_on_after_the_checkpoint_with_its_seed(settled):
    drawn = settled({"data.seed": None})
    leave_checkpoint(settled({"data.seed": 99}), 1)
    whole, resumed = build_run(settled({"data.seed": 99, "trainer.resume_mode": "disable"})), build_run(drawn)
    assert (resumed.checkpoint.step, resumed.settings.data.seed) == (1, 99)
    whole.loader.next_indices()
    for _ in range(4):
        assert resumed.loader.next_indices() == whole.loader.next_indices()


def test_a_data_loaders_state_of_other_types_is_refused(settled):
    leave_checkpoint(settled(), 1, position=[1])
    with pytest.raises(CheckpointError, match=r"global_step_1: no run wrote this checkpoint \(its state\.loader\.position: "):
        build_run(settled())


STREAM = {"data.streaming": True, "data.shuffle_buffer_size": 3, "trainer.total_training_steps": 3}


def drawn(context, steps=1):
    return [[context.loader.dataset[index].text for index in context.loader.next_indices()] for _ in range(steps)]


def test_a_resumed_run_goes_on_with_the_rows_of_a_stream_after_the_checkpoint(settled):
    leave_checkpoint(settled(STREAM), 1)
    whole, resumed = build_run(settled({**STREAM, "trainer.resume_mode": "disable"})), build_run(settled(STREAM))
    assert (whole.total_steps, resumed.checkpoint.step) == (3, 1)
    assert drawn(resumed, 4) == drawn(whole, 5)[1:]
    with pytest.raises(ConfigError, match=r"data\.streaming=False: .*a place in a stream is no place among rows"):
        build_run(settled({"trainer.total_training_steps": 3}))


def test_a_wrong_row_of_a_stream_is_refused_at_the_start_where_it_is_the_first_and_else_when_it_is_drawn(settled, tmp_path):
    good = write_rows(tmp_path / "good.jsonl", 9)
    wrong = write_rows(tmp_path / "wrong.jsonl", 1, source="nobody's")
    settings = {**STREAM, "data.shuffle": False, "custom_reward_function.path": None}
    with pytest.raises(DataError, match=r"wrong\.jsonl:1: .*nobody's"):
        build_run(settled({**settings, "data.train_files": [wrong, good]}))
    context = build_run(settled({**settings, "data.train_files": [good, wrong]}))
    drawn(context, 2)
    with pytest.raises(DataError, match=r"wrong\.jsonl:1: .*nobody's"):
        drawn(context)


def test_a_validation_alone_needs_no_row_of_a_stream(settled):
    only = {"data.streaming": True, "data.train_files": "python:dataset", "trainer.total_training_steps": None}
    assert len(build_run(settled({**only, "trainer.val_only": True})).validation) == 3
    with pytest.raises(ConfigError, match=r"data\.train_files=python:dataset: .*Start the run there again"):
        build_run(settled({**only, "trainer.total_training_steps": 1}))


def test_an_endless_sampler_needs_a_number_of_steps(settled, tmp_path, monkeypatch):
    monkeypatch.setattr("verl_memopt.data.prompts.LOOKAHEAD", 10)
    (tmp_path / "mine.py").write_text(
        "import itertools\n"
        "class Endless:\n    def __init__(self, *numbers): pass\n"
        "    def __iter__(self): return itertools.repeat(0)\n"
    )
    sampler = {"data.sampler.class_path": str(tmp_path / "mine.py"), "data.sampler.class_name": "Endless"}
    assert build_run(settled(sampler)).total_steps == 2
    with pytest.raises(DataError, match=r"data\.sampler: an epoch has more than .*Set trainer\.total_training_steps"):
        build_run(settled({**sampler, "trainer.total_training_steps": None}))


def test_settings_with_seeds_are_used_as_they_are(settled):
    """A copy would hide from a recorder of reads that the run reads them."""
    settings = settled({f"{AR}.rollout.seed": 3})
    assert build_run(settings).settings is settings


def test_a_resumed_run_keeps_the_whole_runs_length_and_resuming_may_be_switched_off(settled):
    settings = settled({"trainer.total_training_steps": None, "trainer.total_epochs": 2})
    leave_checkpoint(settings, 3)
    assert build_run(settings).total_steps == 4
    assert build_run(settled({"trainer.resume_mode": "disable"})).checkpoint is None


def test_a_checkpoint_can_be_named(settled, tmp_path):
    folder = leave_checkpoint(settled(), 2)
    leave_checkpoint(settled({"trainer.resume_mode": "disable"}), 3)
    named = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": f"{folder}/"}
    assert build_run(settled()).checkpoint.step == 3
    assert build_run(settled(named)).checkpoint.step == 2
    elsewhere = named | {"trainer.default_local_dir": str(tmp_path / "new run")}
    assert build_run(settled(elsewhere)).checkpoint.folder == folder


def test_a_run_does_not_go_on_without_its_weights(settled):
    without = {f"{AR}.actor.checkpoint.save_contents": ["hf_model"]}
    assert build_run(settled(without)).checkpoint is None
    leave_checkpoint(settled(), 1)
    with pytest.raises(
        ConfigError, match=r"load_contents=\['hf_model'\]: a run cannot go on from .*global_step_1 without the model"
    ):
        build_run(settled(without))


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_source_without_a_rule_is_named_with_its_row_before_anything_starts(settled, tmp_path, split):
    path = write_rows(tmp_path / "other.jsonl", 5, source="no/rule")
    more = {f"data.{split}_files": path}
    build_run(settled(more))
    with pytest.raises(DataError, match=re.escape(f"{path}:1: data_source 'no/rule' has no rule")):
        build_run(settled(more | {"custom_reward_function.path": None}))


def test_the_plan_counts_the_rollouts_or_every_optimizer_step_of_the_run(settled):
    more = {f"{AR}.actor.ppo_epochs": 3, "trainer.total_training_steps": 5}
    assert build_run(settled(more)).worker_plan.schedule_steps == 5
    plan = build_run(settled(more | {f"{AR}.actor.optim.lr_schedule_steps": "updates"})).worker_plan
    assert plan.schedule_steps == 5 * 2 * 3  # steps, mini-batches of 2 in 4 prompts, passes


@pytest.mark.parametrize(("every", "tracked"), [(0, False), (10, True)])
def test_the_plan_tracks_the_start_when_steps_are_and_names_folders_and_a_reference_where_there_is_one(
    settled, tiny_folder, every, tracked
):
    plan = build_run(settled({"trainer.track_memory_every_steps": every})).worker_plan
    assert plan.track_init is tracked
    assert (plan.folder, plan.engine_folder, plan.reference_folder) == (str(tiny_folder), str(tiny_folder), None)
    assert build_run(settled({f"{AR}.actor.use_kl_loss": True})).worker_plan.reference_folder == str(tiny_folder)


def test_with_overrides_engine_and_trainer_read_the_same_config(settled):
    context = build_run(settled({f"{AR}.model.override_config": {"rms_norm_eps": 1e-4, "tie_word_embeddings": False}}))
    folder = context.worker_plan.engine_folder
    assert folder == str(context.environment.run_dir / "engine_config")
    model = context.settings.actor_rollout_ref.model
    engines = load_model_config(replace(model, override_config={}), context.environment.run_dir / "engine_config").to_dict()
    trainers = load_model_config(model, context.environment.folder).to_dict()
    assert (engines["rms_norm_eps"], engines["tie_word_embeddings"]) == (1e-4, False)
    assert {name for name in engines.keys() | trainers.keys() if engines[name] != trainers[name]} == {"_name_or_path"}


def test_an_engine_cannot_read_weights_that_do_not_fit_the_overrides(settled):
    more = {f"{AR}.model.override_config": {"tie_word_embeddings": False}, f"{AR}.rollout.load_format": "auto"}
    with pytest.raises(ConfigError, match="Leave load_format at dummy"):
        build_run(settled(more))


EVERY_PASS = ("update_actor", "old_log_prob", "ref", "values", "update_critic", "reward")


@pytest.mark.parametrize(
    ("more", "phases"),
    [
        ({}, ()),
        ({f"{AR}.actor.adaptive_token_budget": True}, EVERY_PASS),
        ({f"{AR}.rollout.log_prob_adaptive_token_budget": True}, ("old_log_prob",)),
        ({f"{AR}.ref.log_prob_adaptive_token_budget": True, f"{AR}.ref.log_prob_use_dynamic_bsz": True}, ("ref",)),
        ({"critic.adaptive_token_budget": True}, ("values", "update_critic", "reward")),
        ({"reward_model.adaptive_token_budget": True}, ("reward",)),
    ],
)  # fmt: skip
def test_the_workers_know_the_passes_whose_budget_learns(settled, more, phases):
    assert build_run(settled(more)).worker_plan.adaptive_phases == phases


def test_the_engine_knows_which_rows_of_the_embedding_have_no_token(settled):
    context = build_run(settled())
    known = max(context.environment.tokenizer.get_vocab().values()) + 1
    rows = context.environment.embedding_rows
    assert context.worker_plan.known_ids == (known if known < rows else None)
    assert replace(context.environment, embedding_rows=known + 7).known_ids == known
    assert replace(context.environment, embedding_rows=known).known_ids is None
