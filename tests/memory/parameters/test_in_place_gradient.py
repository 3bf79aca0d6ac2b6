import torch

from verl_memopt.memory.embedding_gradient import adds_in_place, room_for
from verl_memopt.observe.byte_tracker import ByteTracker


def test_only_a_leaf_that_nothing_watches_is_added_to_in_place():
    leaf = torch.nn.Parameter(torch.zeros(2))
    assert adds_in_place(leaf)
    assert not adds_in_place(leaf * 1)
    assert not adds_in_place(leaf.detach())
    hook = leaf.register_post_accumulate_grad_hook(lambda _: None)
    assert not adds_in_place(leaf)
    hook.remove()
    assert adds_in_place(leaf)
    leaf.register_hook(lambda grad: grad)
    assert not adds_in_place(leaf)


def test_the_gradient_that_is_there_is_the_room():
    leaf = torch.nn.Parameter(torch.zeros(2))
    room, handed = room_for(leaf, True, True)
    assert room is leaf.grad
    assert handed is None
    assert room.tolist() == [0, 0]
    assert room_for(leaf, True, True)[0] is room


def test_otherwise_autograd_is_handed_a_tensor_of_its_own():
    leaf = torch.nn.Parameter(torch.zeros(2))
    room, handed = room_for(leaf, True, False)
    assert room is handed
    assert leaf.grad is None


def test_no_room_is_made_for_what_needs_no_gradient():
    assert room_for(torch.nn.Parameter(torch.zeros(2)), False, True) == (None, None)
    assert room_for(None, True, True) == (None, None)


def test_a_new_gradient_is_counted_as_one():
    leaf = torch.nn.Parameter(torch.zeros(8))
    with ByteTracker() as tracker:
        room_for(leaf, True, True)
        assert tracker.kinds() == {"grads": 32}
