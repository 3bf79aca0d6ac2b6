import logging

import pytest
import torch

from tests.workers.test_worker import AR, call, made, mini_batch, same, weights  # noqa: F401 - made is a fixture
from verl_memopt.memory.parameters.residency import NEEDS, POLICY, REFERENCE, Residency

CPU = torch.device("cpu")


class Box:
    """A part that writes its moves into a shared diary."""

    def __init__(self, name, diary, num_bytes=10):
        self.name, self.on_device, self.diary, self.num_bytes = name, True, diary, num_bytes

    def to_host(self):
        return self._move("leaves", False)

    def to_device(self):
        return self._move("comes", True)

    def _move(self, word, there):
        if self.on_device is there:
            return 0
        self.on_device = there
        self.diary.append(f"{self.name} {word}")
        return self.num_bytes


def two_boxes():
    diary, residency = [], Residency(CPU)
    boxes = [Box(POLICY, diary), Box(REFERENCE, diary)]
    for box in boxes:
        residency.add(box)
    return residency, boxes, diary


def test_a_phase_has_what_the_table_says_and_nothing_else():
    residency, boxes, _ = two_boxes()
    for phase, needed in NEEDS.items():
        with residency.phase(phase):
            assert {box.name for box in boxes if box.on_device} == needed & {POLICY, REFERENCE}


def test_what_is_not_needed_leaves_before_what_is_needed_comes():
    residency, _, diary = two_boxes()
    with residency.phase("old_log_prob"), residency.phase("ref"):
        pass
    assert diary == [f"{REFERENCE} leaves", f"{POLICY} leaves", f"{REFERENCE} comes"]


def test_a_part_that_the_next_phase_needs_stays():
    residency, _, diary = two_boxes()
    for phase in ("old_log_prob", "update_actor", "update_weights"):
        with residency.phase(phase):
            pass
    assert diary == [f"{REFERENCE} leaves"]


def test_a_part_can_serve_two_names():
    residency, diary = Residency(CPU), []
    residency.add(Box(POLICY, diary), also=(REFERENCE,))
    for phase in ("old_log_prob", "ref", "update_actor"):
        with residency.phase(phase):
            pass
    assert diary == []


def test_a_phase_that_raises_leaves_parts_that_the_next_one_can_use():
    residency, boxes, _ = two_boxes()
    with pytest.raises(ValueError, match="torn"), residency.phase("ref"):
        raise ValueError("torn")
    with residency.phase("update_actor"):
        assert [box.on_device for box in boxes] == [True, False]


def test_the_bytes_of_a_phase_are_logged_once(caplog):
    residency, _, _ = two_boxes()
    with caplog.at_level(logging.INFO):
        for phase in ("ref", "update_actor") * 3:
            with residency.phase(phase):
                pass
    assert [record.message.split(":")[0] for record in caplog.records] == ["ref", "update_actor"]


OFFLOADED = {f"{AR}.actor.fsdp_config.param_offload": True, f"{AR}.ref.fsdp_config.param_offload": True}


def one_step(worker, track):
    """Gives each phase's memory of a step of a worker with a reference, and the metrics of its update."""
    mini = mini_batch()
    asked = [
        ("update_weights", ()),
        ("old_log_probs", (mini.batch, mini.micro_batches, False)),
        ("ref_log_probs", (mini.batch, mini.micro_batches)),
        ("update_actor", ([mini],)),
        ("update_weights", ()),
    ]
    phases = {"old_log_probs": "old_log_prob", "ref_log_probs": "ref"}
    replies = {method: worker.call(phases.get(method, method), track, method, *args) for method, args in asked}
    return {method: reply.memory for method, reply in replies.items()}, replies["update_actor"].value


def test_a_phase_of_a_worker_holds_one_models_parameters_less_and_gives_the_same_numbers(made, tiny_folder):  # noqa: F811
    found = {}
    for name, more in (("here", {}), ("away", OFFLOADED)):
        worker = made(more, reference_folder=str(tiny_folder))
        one_step(worker, True)
        found[name] = *one_step(worker, True), weights_at_home(worker)
        shard = sum(parameter.numel() for parameter in worker.reference.parameters()) * 4
        worker.close()
    (here, metrics, weights_here), (away, metrics_away, weights_away) = found["here"], found["away"]
    for phase in ("old_log_probs", "ref_log_probs", "update_actor"):
        saved = here[phase].peak_allocated_bytes - away[phase].peak_allocated_bytes
        assert saved == shard, phase
        assert away[phase].host_buffer_bytes - here[phase].host_buffer_bytes == 2 * shard
    assert metrics == metrics_away
    assert same(weights_here, weights_away)


def weights_at_home(worker):
    with worker.residency.phase("update_weights"):
        return weights(worker)


def test_an_exception_inside_a_pass_leaves_a_worker_that_goes_on_as_if_it_had_not_been(made, tiny_folder):  # noqa: F811
    results = []
    for torn in (False, True):
        worker = made(OFFLOADED, reference_folder=str(tiny_folder))
        if torn:
            broken = mini_batch()
            broken.batch.advantages = None
            with pytest.raises(AssertionError):
                call(worker, "update_actor", [broken])
        results.append((call(worker, "update_actor", [mini_batch()]), weights_at_home(worker)))
        worker.close()
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


def test_a_checkpoint_goes_round_with_parameters_at_rest(made, tiny_folder, tmp_path):  # noqa: F811
    worker = made(OFFLOADED, reference_folder=str(tiny_folder))
    call(worker, "update_actor", [mini_batch()])
    call(worker, "save", str(tmp_path), ["model", "optimizer", "extra", "hf_model"])
    assert not worker.policy.trained.home.on_device
    expected = weights_at_home(worker)
    worker.close()
    other = made(OFFLOADED, reference_folder=str(tiny_folder))
    call(other, "load", str(tmp_path), ["model", "optimizer", "extra"])
    assert same(weights_at_home(other), expected)
    call(other, "update_actor", [mini_batch()])
    plain = made({}, reference_folder=str(tiny_folder))
    call(plain, "load", str(tmp_path), ["model", "optimizer", "extra"])
    call(plain, "update_actor", [mini_batch()])
    assert same(weights_at_home(other), weights_at_home(plain))
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "huggingface" / "model.safetensors")
    assert same(exported, expected)


def test_the_log_says_how_much_came_and_how_much_left(caplog):
    residency = Residency(CPU)
    residency.add(Box(POLICY, [], num_bytes=3 * 2**20))
    residency.add(Box(REFERENCE, [], num_bytes=3 * 2**19))
    with caplog.at_level(logging.INFO):
        for phase in ("ref", "update_actor"):
            with residency.phase(phase):
                pass
    assert [record.message for record in caplog.records] == [
        "ref: 0.0 MiB to the device, 3.0 MiB off it, from now on once a step",
        "update_actor: 3.0 MiB to the device, 1.5 MiB off it, from now on once a step",
    ]
