import pytest

from verl_memopt.errors import RolloutError
from verl_memopt.rollout.engine import EngineState, FinishedRows


def load(state):
    with state.loading():
        pass


def test_a_new_engine_without_weights_refuses_to_generate_until_a_load():
    state = EngineState(whole=False)
    with pytest.raises(RolloutError, match="weights are incomplete"):
        state.check_ready()
    load(state)
    state.check_ready()


def test_a_load_that_fails_leaves_an_engine_that_refuses_to_generate():
    state = EngineState(whole=True)

    def torn_load():
        with state.loading():
            raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        torn_load()
    with pytest.raises(RolloutError, match="weights are incomplete"):
        state.check_ready()


def test_after_sleep_weights_must_wake_then_be_loaded_and_the_cache_must_wake():
    state = EngineState(whole=True)
    state.slept()
    with pytest.raises(RolloutError, match="weights and kv_cache asleep"):
        state.check_ready()
    with pytest.raises(RolloutError, match="weights are asleep"):
        load(state)
    with pytest.raises(RolloutError, match="before the weights"):
        state.waking("kv_cache")
    assert state.waking("weights")
    with pytest.raises(RolloutError, match="kv_cache asleep"):
        state.check_ready()
    assert state.waking("kv_cache")
    with pytest.raises(RolloutError, match="weights are incomplete"):
        state.check_ready()
    load(state)
    state.check_ready()


def test_weights_that_are_kept_need_no_load_after_waking():
    state = EngineState(whole=True)
    state.slept(keeps_weights=True)
    state.waking("weights")
    state.waking("kv_cache")
    state.check_ready()


def test_weights_that_were_not_whole_are_not_whole_for_being_kept():
    state = EngineState(whole=False)
    state.slept(keeps_weights=True)
    state.waking("weights")
    state.waking("kv_cache")
    with pytest.raises(RolloutError, match="weights are incomplete"):
        state.check_ready()


def test_a_part_wakes_once_and_an_unknown_part_is_refused():
    state = EngineState(whole=True)
    assert not state.waking("weights")
    with pytest.raises(RolloutError, match=r"'optimizer'.*weights, kv_cache"):
        state.waking("optimizer")


def test_a_part_that_could_not_wake_is_still_asleep():
    state = EngineState(whole=True)
    state.slept()
    assert state.waking("weights")
    assert state.waking("kv_cache")
    state.stays_asleep("kv_cache")
    assert (state.is_awake("weights"), state.is_awake("kv_cache")) == (True, False)
    assert state.waking("kv_cache")


def test_nothing_works_after_a_shutdown():
    state = EngineState(whole=True)
    assert state.close()
    assert not state.close()
    for call in (state.check_ready, state.slept, lambda: state.waking("weights"), lambda: load(state)):
        with pytest.raises(RolloutError, match="shut down"):
            call()


def test_a_row_that_a_full_disk_has_cut_short_is_left_out_with_the_one_behind_it(tmp_path):
    rows = FinishedRows(tmp_path / "finished")
    rows.write(0, [1])
    with rows.path.open("ab") as file:
        file.write(b"[1, [2, 3")
    assert rows.read() == {0: [1]}
    for row in (2, 3):
        rows.write(row, [4])
    assert rows.read() == {3: [4]}
