import torch

from tests.critics import CPU, critic_batch, critic_for
from verl_memopt.worker.policy import forward_pass


def test_outputs_come_with_the_rows_of_their_micro_batch_and_without_gradients(untied_folder, one_rank):
    model, cut = critic_for(untied_folder, one_rank).model, [[3, 1], [2], [0]]
    whole, modes = critic_batch(rows=4), []

    def forward(pack, prefix_kv, rows):
        modes.append(torch.is_grad_enabled())
        assert prefix_kv is None
        return pack.targets

    outputs = forward_pass(model, whole, cut, CPU, forward)
    assert [rows for rows, _ in outputs] == cut
    responses = whole.responses.rows()
    for rows, targets in outputs:
        assert torch.equal(targets, torch.cat([responses[row] for row in rows]))
    assert not any(modes)


def test_one_prefix_kv_serves_the_micro_batches_of_its_prompt_and_no_other(untied_folder, one_rank):
    model, whole = critic_for(untied_folder, one_rank).model, critic_batch(rows=8, shared=True)
    whole.prompts = type(whole.prompts).from_rows([torch.arange(3, 43)] * 4 + [torch.arange(60, 100)] * 4, torch.int64)
    outputs = forward_pass(model, whole, [[0, 1], [2, 3], [4, 5], [6], [7]], CPU, lambda pack, prefix_kv, rows: prefix_kv)
    prefixes = [prefix for _, prefix in outputs]
    assert prefixes[0] is prefixes[1]
    assert prefixes[2] is prefixes[3] is prefixes[4]
    assert prefixes[0] is not prefixes[2]


def test_what_the_pass_gathered_is_freed(untied_folder, one_rank):
    model = critic_for(untied_folder, one_rank, fsdp={"dtype": "bfloat16"}).model
    forward_pass(model, critic_batch(rows=2), [[0, 1]], CPU, lambda pack, prefix_kv, rows: model(pack, prefix_kv))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
