import dataclasses

import pytest

from recipe.rloo.memory_study.arms import FULL, LEGACY, TRUNCATED, Arm, saving_arms, whole_run_arms
from recipe.rloo.memory_study.formula import DESKTOP_BYTES, IDLE_BYTES
from recipe.rloo.memory_study.legacy import Options
from recipe.rloo.memory_study.measure import measure_arm, run_arm
from recipe.rloo.memory_study.measure_cell import measure_cell
from recipe.rloo.memory_study.records import BYTE_TRACKER, SIMULATED_ALLOCATOR, Cell, OutOfMemory
from recipe.rloo.memory_study.shapes import PUBLISHED, SMALL, make_model
from recipe.rloo.memory_study.whole_run import measure_whole_run
from verl_memopt.errors import ConfigError

GIB, MIB = 2**30, 2**20
OWN = "shared_prompt_checkpointing"
STEP = ("forward", "backward", "optimizer")


def arm(update=LEGACY, k=2, rows=2, **changes):
    return dataclasses.replace(Arm(f"token_full_{update}", "token", FULL, update, k, rows), **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("measure"), PUBLISHED, 0)


@pytest.fixture(scope="module")
def records():
    return {
        (LEGACY, "cpu"): measure_arm(arm(), SMALL, "cpu", None, 0),
        (LEGACY, "fake"): measure_arm(arm(), SMALL, "fake", None, 0),
        (OWN, "cpu"): measure_arm(arm(OWN), SMALL, "cpu", None, 0),
        ("string", "cpu"): measure_arm(arm(expansion="string"), SMALL, "cpu", None, 0),
    }


def test_a_record_says_what_ran_and_what_counted_it(records):
    real, fake, own = records[LEGACY, "cpu"][0], records[LEGACY, "fake"][0], records[OWN, "cpu"][0]
    assert (real.measured_by, fake.measured_by, own.measured_by) == (BYTE_TRACKER, SIMULATED_ALLOCATOR, BYTE_TRACKER)
    assert (real.reserved_peak, own.reserved_peak) == (None, None)
    assert fake.reserved_peak >= fake.allocated_peak
    assert (real.dtype, own.dtype) == ("float32, autocast bfloat16", "float32")
    assert (real.rows, real.prompt_len, real.response_len, real.total_tokens) == (2, 48, 8, 2 * 56)
    run = "real tensors, prompt of 48, answers of 8"
    assert [record.values_from for record in (real, fake, own)] == [f"float64, {run}", f"float64, {run}", f"float32, {run}"]


def test_all_programs_have_the_same_ids_and_values(records):
    firsts = [run[0] for run in records.values()]
    assert len({record.ids_sha256 for record in firsts}) == 1
    for record in firsts:
        assert record.loss == pytest.approx(firsts[0].loss, rel=2e-6)
        assert record.grad_norm == pytest.approx(firsts[0].grad_norm, rel=2e-6)


def test_every_epoch_of_the_published_update_is_an_update(records):
    before = [(0, "rollout"), (0, "old_log_prob"), (0, "reference")]
    epochs = [(epoch, name) for epoch in range(3) for name in STEP]
    assert [(record.update, record.phase) for record in records[LEGACY, "cpu"]] == before + epochs
    assert {record.loss is None for record in records[LEGACY, "cpu"] if record.update} == {True}


def test_real_and_fake_tensors_have_the_same_live_bytes(records):
    real, fake = ({(r.update, r.phase): r.allocated_peak for r in records[LEGACY, device]} for device in ("cpu", "fake"))
    assert real.keys() == fake.keys()
    # Blocks are rounded on the fake GPU, and the kernels of attention differ.
    assert all(abs(fake[key] / real[key] - 1) < 0.03 for key in real)


def test_the_expansion_changes_no_byte(records):
    token, string = ([(r.phase, r.allocated_peak, r.allocated_exit) for r in records[name, "cpu"]] for name in (LEGACY, "string"))
    assert token == string


def test_truncated_prompts_are_counted():
    record = measure_arm(arm(prompt=TRUNCATED), SMALL, "cpu", None, 0)[0]
    assert (record.prompt_len, record.dropped_tokens) == (16, 2 * 32)
    assert record.values_from.startswith("float64, real tensors, prompt of 16, answers of 8")


def test_the_fake_gpu_has_no_room_for_the_gradient_of_all_logits(folder):
    with pytest.raises(OutOfMemory) as error:
        run_arm(arm(), SMALL, "fake", 240 * MIB, 0, folder, Options(2))
    assert error.value.phase == "backward"
    assert error.value.shape == "[2, 56, 151669] float32"
    assert error.value.requested_bytes == -(-4 * 2 * 56 * 151_669 // 512) * 512
    assert error.value.requested_bytes + error.value.held_bytes > 240 * MIB >= error.value.peak_bytes


@pytest.mark.slow
def test_the_published_run_with_eight_answers_does_not_fit_its_card(folder):
    with pytest.raises(OutOfMemory) as error:
        run_arm(arm(k=8, rows=8), PUBLISHED, "fake", int(31.8 * GIB) - IDLE_BYTES - DESKTOP_BYTES, 0, folder, Options(8))
    assert (error.value.phase, error.value.shape) == ("backward", "[8, 3115, 151669] float32")


def test_the_tracker_stops_at_the_limit_too():
    with pytest.raises(OutOfMemory) as error:
        measure_arm(arm(), SMALL, "cpu", 150 * MIB, 0)
    assert error.value.held_bytes <= 150 * MIB < error.value.held_bytes + error.value.requested_bytes


def test_an_unknown_device_is_refused():
    with pytest.raises(ConfigError, match="device=tpu: unknown"):
        measure_arm(arm(), SMALL, "tpu", None, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("k", "times"), [(4, 250), (8, 400)])
def test_the_default_update_is_hundreds_of_times_smaller_with_the_whole_prompt(k, times, folder):
    published = run_arm(arm(k=k, rows=k), PUBLISHED, "fake", None, 0, folder, Options(k)).phases
    steady = dataclasses.replace(PUBLISHED, epochs=2)
    ours = run_arm(arm(OWN, k, k), steady, "cpu", None, 0, folder, Options(k)).phases
    largest = [max(phase.peak for phase in run if phase.name in STEP) for run in (published, ours)]
    assert largest[0] > times * largest[1]


@pytest.mark.slow
@pytest.mark.parametrize("k", [8, 16, 32, 64])
def test_large_groups_complete_under_two_gigabytes(k, folder):
    shapes = dataclasses.replace(PUBLISHED, epochs=2)
    phases = run_arm(arm(OWN, k, k), shapes, "cpu", 2 * 10**9, 0, folder, Options(k)).phases
    assert phases[-1].update == 1
    assert max(phase.peak for phase in phases) < 400 * MIB


SHARED = next(arm for arm in saving_arms([2]) if arm.update == "shared_prompt")


def test_a_cell_is_measured_at_its_shapes():
    records = measure_cell(Cell(SHARED, 0, 0, "cpu", None, shapes="small"))
    assert {(record.prompt_len, record.response_len, record.rows) for record in records} == {(SMALL.prompt, SMALL.response, 2)}
    assert {record.measured_by for record in records} == {"byte tracker"}
    assert records[0].loss is not None
    assert any(record.timeline for record in records)


def test_a_documents_file_is_the_prompt(tmp_path):
    path = tmp_path / "document.txt"
    path.write_text("word " * 200)
    cell = Cell(SHARED, 0, 0, "cpu", None, shapes="small")
    ids = {each.ids_sha256 for cell in (cell, dataclasses.replace(cell, documents=str(path))) for each in measure_cell(cell)}
    assert len(ids) == 2


def test_a_whole_step_has_its_phases_and_no_ids_to_compare():
    (arm,) = whole_run_arms()
    arm = dataclasses.replace(arm, k=2, micro_batch=2)
    records = measure_cell(Cell(arm, 0, 0, "cpu", None, shapes="small"))
    assert [record.phase for record in records] == ["gen", "old_log_prob", "ref", "update_actor", "update_weights"]
    assert all(record.allocated_peak > 0 for record in records)
    assert {record.ids_sha256 for record in records} == {""}


PHASES = ["gen", "old_log_prob", "ref", "update_actor", "update_weights"]


def test_every_phase_of_a_step_is_counted_with_every_model():
    run = measure_whole_run(dataclasses.replace(SMALL, epochs=1), 2)
    assert [memory.name for memory in run.phases] == PHASES
    assert run.dropped == 0
    weights = 2 * 151_669 * 8 * 4  # embedding and head
    policy_reference_engine = 3 * weights
    assert all(memory.peak_allocated_bytes > policy_reference_engine for memory in run.phases)
    assert run.peak_bytes == max(memory.peak_allocated_bytes for memory in run.phases)


@pytest.mark.slow
def test_a_whole_step_with_eight_answers_stays_under_a_gigabyte():
    run = measure_whole_run(PUBLISHED, 8)
    assert run.dropped == 0
    assert run.peak_bytes < 10**9
