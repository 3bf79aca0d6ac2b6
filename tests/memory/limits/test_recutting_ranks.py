"""Out-of-memory errors on some of several ranks: all ranks drop the same work, cut alike, and go on."""

from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.critics import critic_batch, critic_for
from tests.memory import activation_cases as act
from tests.memory.batching.test_shared_prompt import grouped
from tests.memory.limits.test_recutting import MIDDLE, out_of_memory
from tests.model.test_prefix_kv import OWN, SHARES, cut_for_ranks
from tests.ranks import run_ranks
from tests.tensors import whole_of
from tests.worker.test_conversations import batch_of, conversations
from tests.worker.test_policy import CPU, batch, shares
from tests.worker.test_worker import AR, place, plan_of
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import Memory
from verl_memopt.distributed.device import training_mesh
from verl_memopt.errors import DeviceMemoryError
from verl_memopt.memory.host_buffers import GIB
from verl_memopt.memory.token_budget_torch import OtherRankError, oom_retry
from verl_memopt.worker.trained_model import MiniBatch
from verl_memopt.worker.worker import Worker

ATOL = 2e-5


class FailingReduction(TorchDispatchMode):
    """Runs out of memory in the place of a reduction of gradients, once."""

    def __init__(self, number):
        super().__init__()
        self._left = number + 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d._reduce_scatter_base_.default:
            self._left -= 1
            if self._left == 0:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


@contextmanager
def failing(model, place, number):
    """Let call ``number`` of a place of the model run out of memory, once."""
    block, count = model.blocks()[-1], [0]
    if place in ("forward", "backward"):
        with out_of_memory(model, number, place == "backward"):
            yield
        return
    if place == "reduction":
        with FailingReduction(number):
            yield
        return

    def fail(*_):
        count[0] += 1
        if count[0] == number + 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    # Before FSDP2's own hook gathers the block; or inside a checkpointed block, whose second forward comes within backward.
    handle = (
        block.register_forward_pre_hook(fail, prepend=True) if place == "gather" else block.self_attn.register_forward_hook(fail)
    )
    try:
        yield
    finally:
        handle.remove()


def mini_of(rank, world_size, carries):
    if not carries:
        return shares(batch(rows=16 * world_size), world_size, MIDDLE)[rank]
    whole, rows = SHARES["ragged"]
    cut, sizes = cut_for_ranks(whole, rows)[rank], whole.responses.sizes()
    return MiniBatch(whole.select(rows[rank]), cut, GlobalCounts(float(sum(sizes)), float(whole.num_rows)))


def updated(rank, folder, world_size, fails=(), size=-1, carries=False, fsdp=None, **options):
    """Gives what an update on this rank leaves: metrics and log-probs, the whole weights, the errors, and the cut.

    ``fails`` are (rank, place, number of the call). ``size``: of the sharding group.
    """
    mesh, fsdp = training_mesh("cpu", world_size, size), dict(fsdp or {})
    policy = act.build(folder, mesh, world_size, fsdp=fsdp, **OWN, **options)
    policy.actor = replaced(policy.actor, {"entropy_coeff": 0.0})
    trained = policy.trained
    # One step of size 1 shows the gradient.
    if not fsdp.get("grad_offload"):
        trained.optimizer = torch.optim.SGD([p for p in policy.model.parameters() if p.requires_grad], lr=1.0)
        trained.schedule = torch.optim.lr_scheduler.LambdaLR(trained.optimizer, lambda step: 1.0)
    mini = mini_of(rank, world_size, carries)
    before = len(mini.micro_batches)
    # FSDP2 gathers ahead by what earlier passes did.
    policy.compute_log_probs(mini.batch, mini.micro_batches, 0.9, False)
    with oom_retry(CPU, True) as record, ExitStack() as stack:
        for where, place, number in fails:
            if where == rank:
                stack.enter_context(failing(policy.model, place, number))
        first = policy.update_on_policy(mini, 0.9)
        # The next one has nothing of the failed attempt left.
        second = policy.update_on_policy(mini_of(rank, world_size, carries), 0.9)
    found = {
        f"{place}/{name}": value
        for place, each in enumerate((first, second))
        for name, value in each.metrics.items()
        if not name.startswith("memory/")  # more bytes move to the host where a forward runs twice
    }
    weights = {name: whole_of(parameter).detach().numpy() for name, parameter in policy.model.named_parameters()}
    outputs = {"first": first.log_probs.numpy(), "second": second.log_probs.numpy()} | weights
    tokens = mini.batch.row_tokens()
    return found, outputs, (record.cap, record.retries), (before, [tokens.cost(rows) for rows in mini.micro_batches])


def each_update(rank, folder, world_size, cases):
    return {name: updated(rank, folder, world_size, **case) for name, case in cases.items()}


def assert_same_updates(folder, world_size, cases, alike=None, atol=ATOL):
    """Asserts that each case with errors ends as the same one without, and that all ranks cut alike."""
    clean = {f"clean {name}": {**case, "fails": ()} for name, case in (cases if alike is None else {"": alike}).items()}
    answers = run_ranks(each_update, world_size, folder, world_size, {**clean, **cases}, timeout=280)
    for name, case in cases.items():
        for rank, answer in enumerate(answers):
            metrics, outputs, (cap, retries), (before, costs) = answer[name]
            expected = answer["clean " if alike is not None else f"clean {name}"]
            assert metrics == {key: pytest.approx(value, abs=atol, rel=atol) for key, value in expected[0].items()}, name
            for key, values in expected[1].items():
                torch.testing.assert_close(*map(torch.from_numpy, (outputs[key], values)), rtol=0, atol=atol, msg=f"{name} {key}")
            assert retries == sum(where == rank for where, *_ in case["fails"]), name
            assert max(costs) <= cap, name
            assert len(costs) > before, name
        assert len({answer[name][2][0] for answer in answers}) == 1, name
        assert len({len(answer[name][3][1]) for answer in answers}) == 1, name


PLACES = {
    "last backward": [(1, "backward", 2)],
    "gather": [(0, "gather", 1)],
    "two ranks": [(0, "forward", 1), (1, "backward", 0)],
    "twice": [(1, "forward", 0), (1, "forward", 7)],
}


def test_an_update_that_fails_on_some_ranks_is_the_same_update(untied_folder):
    assert_same_updates(untied_folder, 2, {name: {"fails": fails} for name, fails in PLACES.items()}, alike={})


KEEP = {"reshard_after_forward": False}
WAYS = {
    "recomputed": {"recompute": True, "fails": [(1, "recompute", 3)]},
    "gathered": {"fsdp": {"reshard_after_forward": False, "gradient_sync": "last"}, "fails": [(1, "backward", 1)]},
    "replicated": {"size": 1, "fails": [(1, "backward", 1)]},
    "carried": {"carries": True, "fails": [(0, "backward", 1)]},
}


def test_an_update_fails_and_goes_on_however_it_is_sharded(untied_folder):
    assert_same_updates(untied_folder, 2, WAYS)


SMALL_BUCKET = {"bucket_megabytes": 0.004}
"""The head's gradient comes in several tiles, each reduced in the head's forward."""
MORE = {
    "offloaded": {"recompute": True, "offload": (1, 2), "fails": [(0, "recompute", 1)]},
    "gradients on the host": {"fsdp": {"grad_offload": True}, "fails": [(1, "backward", 1)]},
    "tiles of the head": {"fsdp": {"grad_offload": True}, "optim": SMALL_BUCKET, "fails": [(1, "reduction", 2)]},
    "parameters on the host": {"fsdp": {"offload_policy": True, "gradient_sync": "last"}, "fails": [(1, "backward", 1)]},
    "adapters": {"lora_rank": 4, "lora_alpha": 8.0, "carries": True, "fails": [(1, "forward", 0)]},
    "carried and gathered": {"carries": True, "fsdp": KEEP | {"gradient_sync": "last"}, "fails": [(1, "backward", 0)]},
}
ON_FOUR = {
    "last rank": {"fails": [(3, "backward", 2)]},
    "two shards of two copies": {"size": 2, "fails": [(1, "forward", 1), (2, "backward", 0)]},
    "all": {"size": 2, "fails": [(rank, "backward", 0) for rank in range(4)]},
}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, MORE), (4, ON_FOUR)])
def test_an_update_fails_and_goes_on_with_every_knob_and_more_ranks(untied_folder, ranks, cases):
    assert_same_updates(untied_folder, ranks, cases)


def scored(rank, folder, world_size, fails, carries, fsdp):
    """Gives the log-probs of a pass on this rank, how many forwards it took, and the errors; then the values of a critic."""
    mesh = training_mesh("cpu", world_size, -1)
    policy = act.build(folder, mesh, world_size, fsdp=fsdp, **OWN)
    critic, whole = critic_for(folder, mesh, world_size, fsdp=fsdp), critic_batch(16 * world_size, shared=True)
    mini, found = mini_of(rank, world_size, carries), {}
    values = shares(whole, world_size, MIDDLE)[rank]
    passes = {
        "log_probs": (policy.model, lambda: policy.compute_log_probs(mini.batch, mini.micro_batches, 0.9, False).log_probs),
        "values": (critic.model, lambda: critic.values(values.batch, values.micro_batches)),
    }
    for name, (model, run) in passes.items():
        calls = [0]
        counter = model.blocks()[-1].register_forward_hook(lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1))
        with oom_retry(CPU, True) as record, ExitStack() as stack:
            for where, place, number in fails:
                if where == rank:
                    stack.enter_context(failing(model, place, number))
            output = run()
        counter.remove()
        found[name] = output.numpy(), calls[0], record.cap, record.retries
    return found


def each_pass(rank, folder, world_size, cases):
    return {name: scored(rank, folder, world_size, **case) for name, case in cases.items()}


PASSES = {
    "clean": ([], False, {}),
    "first": ([(1, "forward", 0)], False, {}),
    "later": ([(0, "forward", 1), (1, "gather", 0)], False, {}),
    "kept": ([(0, "forward", 1)], False, KEEP),
    "clean carried": ([], True, KEEP),
    "carried": ([(1, "forward", 1)], True, KEEP),
}


def assert_same_passes(folder, world_size, names):
    cases = {name: dict(zip(("fails", "carries", "fsdp"), PASSES[name], strict=True)) for name in names}
    answers = run_ranks(each_pass, world_size, folder, world_size, cases, timeout=280)
    for name, case in cases.items():
        for what in ("log_probs", "values"):
            for rank, answer in enumerate(answers):
                output, _, cap, retries = answer[name][what]
                expected = answer["clean carried" if case["carries"] else "clean"][what][0]
                torch.testing.assert_close(*map(torch.from_numpy, (output, expected)), rtol=0, atol=1e-5, msg=f"{name} {what}")
                assert retries == sum(where == rank for where, *_ in case["fails"]), name
                assert (cap is None) == (not case["fails"])
            assert len({answer[name][what][2] for answer in answers}) == 1, name
    return answers


def test_a_pass_that_fails_on_some_ranks_gives_what_it_would_have_given(untied_folder):
    answers = assert_same_passes(untied_folder, 2, PASSES)
    # What the other rank has computed stays: beside its own micro-batches it only keeps step with the rank that cut again.
    clean, first = (answers[0][name]["log_probs"] for name in ("clean", "first"))
    assert (clean[0] == first[0]).all()


def lonely(rank, folder):
    """Gives the error of a pass of one row a micro-batch, which fails on rank 1."""
    policy = act.build(folder, training_mesh("cpu", 2, -1), 2, **OWN)
    mini = shares(batch(rows=32), 2, MIDDLE)[rank]
    rows = [[row] for row in range(mini.batch.num_rows)]
    longest = max(range(len(rows)), key=lambda row: mini.batch.row_tokens().cost([row]))
    with ExitStack() as stack:
        if rank:
            stack.enter_context(failing(policy.model, "forward", longest))
        with oom_retry(CPU, True), pytest.raises(RuntimeError) as caught:
            policy.compute_log_probs(mini.batch, rows, 0.9, False)
    return type(caught.value).__name__, str(caught.value)


def test_a_row_that_has_no_room_alone_ends_the_pass_on_all_ranks(untied_folder):
    (other, text), (own, _) = run_ranks(lonely, 2, untied_folder)
    assert own == "OutOfMemoryError"
    assert other == OtherRankError.__name__
    assert "worker 1 is out of device memory" in text


def worked(rank, folder, limits, adaptive):
    """Gives the replies of a worker whose device is limited, or the text of its error."""
    memory = Memory(device_limit_gb=None if limits[rank] is None else limits[rank] / GIB)
    more = {f"{AR}.model.logprob_chunk_tokens": 0}
    worker = Worker(plan_of(folder, more, memory=memory, adaptive_phases=adaptive), place(rank, 2))
    mini, replies = shares(grouped(8, [40] * 16), 2, 400)[rank], {}
    try:
        for phase, method, *args in (
            ("old_log_prob", "old_log_probs", mini.batch, mini.micro_batches, False),
            ("update_actor", "update_actor", [mini]),
        ):
            rest = sum(tensor.nbytes for _, tensor in worker._resident())
            reply = worker.call(phase, True, method, *args)
            value = reply.value.log_probs.numpy() if phase == "old_log_prob" else reply.value
            replies[phase] = value, reply.retries, reply.cap_after_error, reply.memory.peak_allocated_bytes, rest
    except (DeviceMemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        worker._free_models()
    return replies


def test_a_worker_with_a_small_device_goes_on_beside_one_with_a_large_one_where_its_budget_adapts(untied_folder):
    phases = ("old_log_prob", "update_actor")
    free = run_ranks(worked, 2, untied_folder, [None, None], phases)
    assert all(reply[1] == 0 and reply[2] is None for answer in free for reply in answer.values())
    *_, peak, rest = free[1]["update_actor"]
    limit = rest + (peak - rest) * 7 // 10
    found = run_ranks(worked, 2, untied_folder, [None, limit], phases)
    for answer, expected in zip(found, free, strict=True):
        torch.testing.assert_close(*(torch.from_numpy(each["old_log_prob"][0]) for each in (answer, expected)), rtol=0, atol=1e-5)
        metrics, expected_metrics = (each["update_actor"][0] for each in (answer, expected))
        assert metrics == {name: pytest.approx(value, abs=1e-5, rel=1e-5) for name, value in expected_metrics.items()}
    assert found[0]["update_actor"][1] == 0 < found[1]["update_actor"][1]
    assert found[0]["update_actor"][2] == found[1]["update_actor"][2] < 400
    # Without an adaptive budget it is an error that names the worker.
    *_, peak, rest = free[1]["old_log_prob"]
    _, text = run_ranks(worked, 2, untied_folder, [None, rest + (peak - rest) // 2], ())
    assert text.startswith("DeviceMemoryError: old_log_prob on worker 1: out of device memory at")
    assert "adaptive_token_budget=true" in text


def talked(rank, folder, cases):
    """Gives for each case log-probs and gradients of conversations, the words, and the lowest caps of pass and update."""
    whole, answers = batch_of(*conversations()), {}
    longest = max(whole.row_tokens().row_lengths())
    for case, (budget, pass_fails, update_fails) in cases.items():
        policy = act.build(folder, training_mesh("cpu", 2, -1), 2, **OWN)
        mini, found, caps = shares(whole, 2, budget or longest)[rank], {}, []
        for name, fails, run in (
            ("log_probs", pass_fails, lambda p, m: p.compute_log_probs(m.batch, m.micro_batches, 0.9, False).log_probs),
            ("loss", update_fails, lambda p, m: p.trained.forward_backward(m, p.loss_at(0.9))["actor/loss"]),
        ):
            with oom_retry(CPU, True) as record, ExitStack() as stack:
                for where, place, number in fails:
                    if where == rank:
                        stack.enter_context(failing(policy.model, place, number))
                found[name] = run(policy, mini).numpy()
            caps.append(record.cap)
        found |= {name: whole_of(weight.grad).numpy() for name, weight in policy.model.named_parameters()}
        answers[case] = found, [getattr(rows, "word", None) for rows in mini.micro_batches], caps
    return answers


TALKS = {
    "clean": (None, [], []),
    # Micro-batches of whole conversations.
    "whole": (None, [(1, "forward", 0)], [(0, "backward", 1)]),
    # Passes of parts, at a place where one rank has nodes open.
    "in parts": (24, [(0, "forward", 2)], [(1, "backward", 2)]),
}
"""Budget, None = the longest conversation; then what fails in a pass, and in an update."""


def test_conversations_that_have_no_room_on_one_rank_are_computed_in_parts_on_all(untied_folder):
    answers = run_ranks(talked, 2, untied_folder, TALKS)
    for case in ("whole", "in parts"):
        for answer in answers:
            found, words, caps = answer[case]
            assert caps == [16, 16]
            assert words == answers[0][case][1]
            assert "(" in words[0]
            for name, values in answer["clean"][0].items():
                torch.testing.assert_close(*map(torch.from_numpy, (found[name], values)), rtol=0, atol=ATOL, msg=name)
