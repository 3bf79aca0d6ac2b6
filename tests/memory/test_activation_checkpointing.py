import torch
from torch import nn

from verl_memopt.memory.activation_checkpointing import checkpoint_blocks
from verl_memopt.observe.byte_tracker import ByteTracker


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def stack(width=16, depth=4):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(depth)))


def gradients(model, x):
    model(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_checkpointing_changes_no_gradient_bit_for_bit():
    x = torch.randn(8, 16)
    plain, recomputed = stack(), stack()
    checkpoint_blocks(recomputed)
    for one, other in zip(gradients(plain, x), gradients(recomputed, x), strict=True):
        assert torch.equal(one, other)


def test_checkpointing_changes_no_name_and_no_class():
    plain, recomputed = stack(), stack()
    checkpoint_blocks(recomputed)
    assert list(plain.state_dict()) == list(recomputed.state_dict())
    assert all(isinstance(block, Block) for block in recomputed)


def test_a_block_keeps_its_input_only():
    tokens, width, depth = 32, 16, 4
    kept = {}
    for name, model in {"plain": stack(width, depth), "recomputed": stack(width, depth)}.items():
        if name == "recomputed":
            checkpoint_blocks(model)
        x = torch.randn(tokens, width)
        with ByteTracker() as tracker:
            tracker.mark("params", [*model.parameters(), x])
            before = tracker.total()
            output = model(x)
            kept[name] = tracker.total() - before
            del output
    # Plain keeps each block's relu (4 x width) beside its output; recomputed only the outputs, the next blocks' inputs.
    outputs = depth * tokens * width * 4
    assert kept["plain"] == outputs + depth * tokens * 4 * width * 4
    assert kept["recomputed"] == outputs
