import pytest

from verl_memopt.memory.knobs import index
from verl_memopt.trainer.ladder import Work, as_json, ladder_settings, make_batch, measure, rungs

WORK = Work(rows=4, prompt=24, response=8, group=4)


def test_the_ladder_goes_from_all_off_to_all_on_one_knob_at_a_time():
    climbed = [entry for entry in index() if entry.on]
    names = [name for name, _ in rungs()]
    assert names == ["all off", *(entry.name for entry in climbed)]
    last = set(list(rungs())[-1][1])
    assert {override for entry in climbed for override in entry.on} <= last


def test_a_knob_that_is_on_is_not_off_as_well():
    for _, overrides in rungs():
        keys = [override.split("=")[0] for override in overrides]
        assert len(keys) == len(set(keys))


def test_every_rung_is_a_valid_configuration(tiny_folder):
    for _, overrides in rungs():
        assert ladder_settings(str(tiny_folder), WORK, overrides).trainer.worker_group == "local"


def test_the_batch_is_the_same_for_the_same_work():
    one, two = make_batch(WORK), make_batch(WORK)
    assert one.num_rows == 4
    assert one.prompts.sizes() == [24] * 4
    assert one.responses.sizes() == [8] * 4
    assert (one.responses.flat == two.responses.flat).all()
    assert (one.advantages == two.advantages).all()


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    from verl_memopt.models.tiny import TinyShape, make_tiny_model

    folder = make_tiny_model(tmp_path_factory.mktemp("wide") / "model", TinyShape(vocab_size=4096))
    return [measure(folder, WORK, *rung) for rung in (next(iter(rungs())), list(rungs())[1])]


def test_a_rung_reports_phases_kinds_bytes_and_the_same_result(ends):
    off, chunked = ends
    assert off.phases.keys() == {"old_log_prob", "update_actor", "update_weights"}
    assert off.peak_device_bytes == max(off.phases.values()) == sum(off.kinds.values())
    assert chunked.loss == pytest.approx(off.loss, rel=1e-5)
    assert chunked.grad_norm == pytest.approx(off.grad_norm, rel=1e-5)


def test_plain_values_name_model_work_and_rungs(ends):
    plain = as_json(ends, WORK, "m")
    assert plain["work"]["prompt"] == 24
    assert {"knob", "phases", "kinds", "peak_device_bytes", "host_bytes", "seconds"} <= plain["rungs"][0].keys()
