"""The update with a teacher against whole logits in float64: shared prompts, tiles, adapters, quantised teachers, two ranks."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.ranks import run_ranks
from tests.tensors import whole_of
from tests.worker.test_policy import CPU, SMALL, WHOLE, batch, relative, shares
from tests.worker.test_teacher import HEAT, ON_POLICY, divergence_of
from tests.worker.test_teacher import teacher_folder as teacher_folder
from verl_memopt.config.schema import Distill, Fsdp, Model
from verl_memopt.data.batch import Ragged
from verl_memopt.distributed.device import training_mesh
from verl_memopt.memory.lora_torch import LoraLinear, adapters
from verl_memopt.memory.quantized_frozen_torch import QuantizedLinear
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.weights import named_weights
from verl_memopt.worker.policy import Policy
from verl_memopt.worker.teacher import Teacher, Teachers
from verl_memopt.worker.trained_model import micro_batches_of

RANK, SCALE = 4, 2.0
FORMS = [
    Distill(coef=0.7, divergence="reverse_kl"),
    Distill(coef=0.7, divergence="forward_kl"),
    Distill(coef=0.7, divergence="jsd", beta=0.3),
    Distill(coef=0.7, divergence="reverse_kl", top_k=5),
    Distill(coef=0.7, divergence="forward_kl", top_k=5),
]


@dataclasses.dataclass(frozen=True)
class Knobs:
    lora: bool = False
    quantization: str = "none"
    tile: int = 0
    shares: bool = False
    budget: int = SMALL

    def batch(self):
        whole = batch()
        whole.advantages = torch.zeros_like(whole.advantages)
        whole.old_log_probs = whole.ref_log_probs = None
        if self.shares:
            prompts = whole.prompts.rows()
            whole.prompts = Ragged.from_rows([prompts[row // 4 * 4] for row in range(16)], torch.int64)
            whole.prompt_group = whole.group
        whole.places = torch.arange(whole.advantages.shape[0])
        return whole


def built(folder, mesh, knobs, trained):
    lora = {"lora_rank": RANK, "lora_alpha": RANK * SCALE} if knobs.lora and trained else {}
    settings = Model(path=str(folder), attn_implementation="sdpa", logprob_chunk_tokens=8, logprob_vocab_tile=knobs.tile, **lora)
    use = ModelUse(trained=trained, quantization="none" if trained else knobs.quantization)
    model = build_policy(settings, Fsdp(dtype="fp32"), folder, mesh, CPU, use)
    materialize(model, folder, CPU)
    draw = torch.Generator().manual_seed(5)
    for layer in adapters(model).values() if trained else ():
        for parameter in (layer.lora_A, layer.lora_B):
            whole = 0.1 * torch.randn(parameter.shape, generator=draw)
            own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            first = 0 if own.shape == parameter.shape else torch.distributed.get_rank() * own.shape[0]
            own.detach().copy_(whole[first : first + own.shape[0]])
    return model


def learned(folder, teacher, mesh, distill, knobs, world_size=1, rank=0):
    """Return the loss of an update, and the gradients of what is trained."""
    policy = Policy(built(folder, mesh, knobs, True), ON_POLICY, 10, world_size, CPU)
    role = Teacher(built(teacher, mesh, knobs, False), distill, HEAT, CPU, 320)
    whole = knobs.batch()
    mini = shares(whole, world_size, knobs.budget)[rank]
    role.compute(mini.batch, [[row] for row in range(mini.batch.num_rows)])
    teachers = Teachers([role])
    policy.distill_coef, policy.teaching = distill.coef, teachers.of
    with teachers.in_update(1):
        micro = micro_batches_of(mini.batch, mini.micro_batches, policy.model.supports_prefix_kv)
        metrics = policy.accumulate(micro, mini.counts, HEAT)
    grads = {name: parameter.grad for name, parameter in named_weights(policy.model) if parameter.grad is not None}
    return float(metrics["actor/loss"]), {name: whole_of(grad).clone().numpy() for name, grad in grads.items()}


def naive(folder, teacher, mesh, distill, knobs):
    """The same from whole logits in float64, one row at a time, in transformers."""
    student, frozen = (AutoModelForCausalLM.from_pretrained(each, dtype=torch.float64) for each in (folder, teacher))
    layers = {name.removeprefix("lm."): module for name, module in built(teacher, mesh, knobs, False).named_modules()}
    for name, module in layers.items():
        if isinstance(module, QuantizedLinear):
            frozen.get_submodule(name).weight.data = module.packing.dequantize(module.qweight, torch.float32).double()
    adapted = {}
    for name, layer in adapters(built(folder, mesh, knobs, True)).items():
        assert isinstance(layer, LoraLinear)
        adapted[name] = [part.detach().double() for part in (layer.lora_A, layer.lora_B)]
        student.get_submodule(name).weight.data += SCALE * adapted[name][1] @ adapted[name][0]
    whole, total = knobs.batch(), torch.zeros((), dtype=torch.float64)
    for prompt, response in zip(whole.prompts.rows(), whole.responses.rows(), strict=True):
        if len(response):
            ids, first = torch.cat([prompt, response])[None], len(prompt) - 1
            log_p, log_q = ((model(ids).logits[0, first:-1] / HEAT).log_softmax(-1) for model in (student, frozen))
            total = total + divergence_of(distill, *of_few(distill, log_p, log_q.detach())).sum()
    total = distill.coef * total / len(whole.responses.flat)
    total.backward()
    grads = {name: parameter.grad for name, parameter in student.named_parameters()}
    for name, (down, up) in adapted.items():
        grad = grads[f"{name}.weight"]
        grads[f"{name}.lora_A"], grads[f"{name}.lora_B"] = SCALE * up.T @ grad, SCALE * grad @ down.T
    return total.item(), grads


def of_few(distill, log_p, log_q):
    if distill.top_k is None:
        return log_p, log_q
    ids = log_q.topk(distill.top_k).indices
    others = torch.zeros_like(log_q, dtype=torch.bool).scatter(-1, ids, True)
    return (
        torch.cat([each.gather(-1, ids), each.masked_fill(others, -torch.inf).logsumexp(-1, keepdim=True)], 1)
        for each in (log_p, log_q)
    )


def assert_equal(found, expected):
    (loss, gradients), (true_loss, true_gradients) = found, expected
    assert relative(loss, true_loss) <= 2e-6
    pairs = [(torch.from_numpy(gradient), true_gradients[name]) for name, gradient in gradients.items()]
    error, norm = (
        sum(each.square().sum() for each in parts) ** 0.5 for parts in ([a - b for a, b in pairs], [b for _, b in pairs])
    )
    assert error <= 2e-6 * norm


ALONE = {
    "shared prompts, several micro-batches": Knobs(shares=True),
    "shared prompts, one micro-batch, tiles": Knobs(shares=True, budget=WHOLE, tile=50),
    "adapters": Knobs(lora=True),
    "adapters, shared prompts, tiles": Knobs(lora=True, shares=True, tile=50, budget=WHOLE),
    "int8": Knobs(quantization="int8"),
    "nf4, adapters, shared prompts": Knobs(quantization="nf4", lora=True, shares=True),
}


@pytest.mark.parametrize("knobs", ALONE.values(), ids=ALONE)
@pytest.mark.parametrize("distill", FORMS, ids=lambda distill: f"{distill.divergence}_{distill.top_k}")
def test_loss_and_gradients_equal_those_of_whole_logits(tiny_folder, teacher_folder, one_rank, distill, knobs):
    found = learned(tiny_folder, teacher_folder, one_rank, distill, knobs)
    assert found[1]
    assert all("lora" in name for name in found[1]) == knobs.lora
    assert_equal(found, naive(tiny_folder, teacher_folder, one_rank, distill, knobs))


def two_ranks(rank, folder, teacher, distill, knobs):
    return learned(folder, teacher, training_mesh("cpu", 2, -1), distill, knobs, 2, rank)


@pytest.mark.parametrize("place", range(len(FORMS)))
def test_two_ranks_learn_what_whole_logits_teach(tiny_folder, teacher_folder, one_rank, place):
    knobs = Knobs(shares=place % 2 == 0, lora=place == 3)
    expected = naive(tiny_folder, teacher_folder, one_rank, FORMS[place], knobs)
    answers = run_ranks(two_ranks, 2, tiny_folder, teacher_folder, FORMS[place], knobs)
    assert_equal((sum(loss for loss, _ in answers), answers[0][1]), expected)
