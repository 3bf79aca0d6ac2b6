import pytest

from verl_memopt.config.keys import leaf_keys, section_keys
from verl_memopt.config.problems import shown
from verl_memopt.config.refusals import REFUSED, refusal_of

ASKING = "something else"


def instance(row: str) -> str:
    """A key that the row covers and no other row does."""
    return row.replace(".*", ".some_key")


@pytest.mark.parametrize("row", REFUSED)
def test_inert_values_change_nothing_and_earn_one_warning(settled, caplog, row):
    plain = settled({})
    inert = REFUSED[row].inert
    for value in (None, *((ASKING,) if inert is None else inert)):
        caplog.clear()
        assert settled({instance(row): value}) == plain
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert caplog.messages[0] == f"{instance(row)}={shown(value)} does nothing here: {REFUSED[row].reason}."


@pytest.mark.parametrize("row", [row for row, refusal in REFUSED.items() if refusal.inert is not None])
def test_a_value_that_asks_for_something_is_refused_with_the_reason(complaint, row):
    message = complaint({instance(row): ASKING})
    assert message.startswith(f"{instance(row)}={ASKING}: ")
    assert message.endswith(f": {REFUSED[row].reason}.")


def test_no_row_covers_a_key_that_has_an_effect():
    assert [key for key in (*leaf_keys(), *section_keys()) if refusal_of(key)] == []


def test_a_row_of_its_own_wins_over_the_section_above_it():
    assert refusal_of("actor_rollout_ref.rollout.multi_turn.enable").inert == (False,)
    assert refusal_of("actor_rollout_ref.rollout.multi_turn.format").inert is None


def test_a_whole_section_without_effect_may_be_empty(settled):
    assert settled({"actor_rollout_ref": {"rollout": {"engine_kwargs": {"sglang": {}}}}}) == settled({})


@pytest.mark.parametrize(("key", "value"), [("actor_rollout_ref.model.use_shm", 0), ("trainer.critic_warmup", False)])
def test_zero_is_not_false(complaint, key, value):
    assert key in complaint({key: value})


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("actor_rollout_ref.actor.strategy", "fsdp", "Set fsdp2."),
        ("actor_rollout_ref.actor.strategy", "megatron", "Set fsdp2."),
        ("actor_rollout_ref.rollout.name", "sglang", "Set vllm or hf."),
        ("actor_rollout_ref.rollout.mode", "sync", "Set async."),
        ("algorithm.adv_estimator", "gae", "Set rloo or grpo."),
        ("algorithm.expansion", "lazy", "Set string or token."),
        ("actor_rollout_ref.actor.fsdp_config.dtype", "fp16", "loss scaling"),
    ],
)
def test_a_choice_of_verl_that_is_not_here_is_refused_with_the_ones_that_are(complaint, key, value, reason):
    message = complaint({key: value})
    assert message.startswith(f"{key}={value}: ")
    assert reason in message
