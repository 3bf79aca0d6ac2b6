import gc
import logging

import pytest
import torch

from tests.critics import critic_mini, critic_plan, critic_weights
from tests.virtual_gpu.late_streams import late_streams
from tests.worker.test_worker import AR, call, mini_batch, same, weights
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.memory.residency import CRITIC, NEEDS, POLICY, REFERENCE, REWARD_MODEL, OffloadedParams, Residency

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


def test_a_phase_of_a_worker_holds_one_models_parameters_less_and_gives_the_same_numbers(made, tiny_folder):
    found, left = {}, {}
    for name, more in (("here", {}), ("away", OFFLOADED)):
        gc.collect()
        left[name] = host_allocator().held_bytes  # of workers that earlier tests have left
        worker = made(more, reference_folder=str(tiny_folder))
        one_step(worker, True)
        found[name] = *one_step(worker, True), weights_at_home(worker)
        shard = sum(parameter.numel() for parameter in worker.reference.parameters()) * 4
        worker.close()
    (here, metrics, weights_here), (away, metrics_away, weights_away) = found["here"], found["away"]
    for phase in ("old_log_probs", "ref_log_probs", "update_actor"):
        saved = here[phase].peak_allocated_bytes - away[phase].peak_allocated_bytes
        assert saved == shard, phase
        used = {name: found[name][0][phase].host_buffer_bytes - left[name] for name in found}
        assert used["away"] - used["here"] == 2 * shard
    assert metrics == metrics_away
    assert same(weights_here, weights_away)


def weights_at_home(worker):
    with worker.residency.phase("update_weights"):
        return weights(worker)


def test_an_exception_inside_a_pass_leaves_a_worker_that_goes_on_as_if_it_had_not_been(made, tiny_folder):
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


def test_a_checkpoint_goes_round_with_parameters_at_rest(made, tiny_folder, tmp_path):
    worker = made(OFFLOADED, reference_folder=str(tiny_folder))
    call(worker, "update_actor", [mini_batch()])
    call(worker, "save", str(tmp_path), ["model", "optimizer", "extra", "hf_model"])
    assert not worker.policy.trained.home.on_device
    expected = weights_at_home(worker)
    other = made(OFFLOADED, reference_folder=str(tiny_folder))
    call(other, "load", str(tmp_path), ["model", "optimizer", "extra"])
    assert same(weights_at_home(other), expected)
    call(other, "update_actor", [mini_batch()])
    updated = weights_at_home(other)
    plain = made({}, reference_folder=str(tiny_folder))
    call(plain, "load", str(tmp_path), ["model", "optimizer", "extra"])
    call(plain, "update_actor", [mini_batch()])
    assert same(updated, weights_at_home(plain))
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "huggingface" / "model.safetensors")
    assert same(exported, expected)


def test_the_log_says_once_a_phase_how_much_came_and_how_much_left(caplog):
    residency = Residency(CPU)
    residency.add(Box(POLICY, [], num_bytes=3 * 2**20))
    residency.add(Box(REFERENCE, [], num_bytes=3 * 2**19))
    with caplog.at_level(logging.INFO):
        for phase in ("ref", "update_actor") * 3:
            with residency.phase(phase):
                pass
    assert [record.message for record in caplog.records] == [
        "ref: 0.0 MiB to the device, 3.0 MiB off it, from now on once per step",
        "update_actor: 3.0 MiB to the device, 1.5 MiB off it, from now on once per step",
    ]


def stepped_after_a_rollout(made, resting):
    """Gives the policy's weights after a step of a gradient that was there before the policy left the device and came back."""
    worker = made(resting)
    for _ in range(2):
        call(worker, "update_actor", [mini_batch()])
        worker.call("update_actor", False, "add_gradient", mini_batch())
        worker.call("gen", False, "release_engine")
        worker.call("update_actor", False, "take_step", None)
    found = weights_at_home(worker)
    worker.close()
    return found


def test_an_optimizer_step_without_a_forward_waits_for_parameters_that_come_late(made):
    expected = stepped_after_a_rollout(made, {})
    with late_streams():
        assert same(stepped_after_a_rollout(made, OFFLOADED), expected)


# The critic and the policy take turns.

TURNS = {f"{AR}.actor.fsdp_config.param_offload": True, f"{AR}.actor.fsdp_config.optimizer_offload": True}


def test_a_phase_of_the_critic_moves_the_policy_out_first(made, tiny_folder):
    worker = made(TURNS, **critic_plan(tiny_folder, {"critic.model.fsdp_config.param_offload": True}))
    homes = worker.policy.trained.home, worker.critic.trained.home
    for phase in ("old_log_prob", "values", "update_critic", "update_actor", "load_critic", "save_checkpoint", "gen"):
        with worker.residency.phase(phase):
            assert [home.on_device for home in homes] == [POLICY in NEEDS[phase], CRITIC in NEEDS[phase]], phase


def test_the_turns_of_critic_and_policy_change_no_number(made, tiny_folder):
    found = []
    resting = {f"critic.model.fsdp_config.{name}": True for name in ("param_offload", "optimizer_offload")}
    for policy, critic in (({}, {}), (TURNS, resting)):
        worker = made(policy, **critic_plan(tiny_folder, critic))
        learnt = critic_mini()
        for _ in range(2):
            values = worker.call("values", False, "values", learnt.batch, learnt.micro_batches).value
            learning = worker.call("update_critic", False, "update_critic", [learnt]).value
            metrics = worker.call("update_actor", False, "update_actor", [mini_batch()]).value
        found.append((values, learning, metrics, critic_weights(worker)))
        made.close()
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:3] == found[1][1:3]
    assert same(found[0][3], found[1][3])


def two_in_one_place(residency, size=3):
    """Adds a reference of ones and a student of twos that share one parameter, and returns it and the student."""
    parameter = torch.nn.Parameter(torch.ones(size), requires_grad=False)
    reference, student = (OffloadedParams(name, [parameter], CPU) for name in (REFERENCE, REWARD_MODEL))
    reference.to_host()
    reference.to_device()
    parameter.fill_(2)
    student.to_host()
    reference.on_device = False
    residency.add(reference)
    residency.add(student)
    residency.take_turns(reference, student)
    return parameter, student


def test_a_part_is_found_by_its_name():
    residency, boxes, _ = two_boxes()
    assert residency.find(REFERENCE) is boxes[1]
    assert residency.find(REWARD_MODEL) is None


def test_the_log_counts_what_takes_turns_in_one_place(caplog):
    residency = Residency(CPU)
    two_in_one_place(residency, 2**18)
    with caplog.at_level(logging.INFO):
        for phase in ("reward", "ref", "gen"):
            with residency.phase(phase):
                pass
    assert [record.message.partition(",")[0] for record in caplog.records[:2]] == [
        "reward: 1.0 MiB to the device", "ref: 1.0 MiB to the device",
    ]  # fmt: skip


def test_parts_of_several_places_take_turns_in_each():
    residency = Residency(CPU)
    parameters, students = zip(*(two_in_one_place(residency) for _ in range(3)), strict=True)
    assert residency.find(REWARD_MODEL) is students[0]
    addresses = set()
    for phase, value in (("reward", 2.0), ("ref", 1.0), ("reward", 2.0), ("reward", 2.0), ("ref", 1.0)):
        with residency.phase(phase):
            assert [parameter.tolist() for parameter in parameters] == [[value] * 3] * 3
            addresses.add(tuple(parameter.data_ptr() for parameter in parameters))
    assert len(addresses) == 1
    for phase in ("gen", "old_log_prob"):
        with residency.phase(phase):
            assert all(parameter.untyped_storage().nbytes() == 0 for parameter in parameters)
    with residency.phase("ref"):
        assert all(parameter.tolist() == [1.0] * 3 for parameter in parameters)
