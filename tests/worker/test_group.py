import socket

from verl_memopt.worker.group import Placement, process_environment
from verl_memopt.worker.nodes import free_port

PLACE = Placement(rank=5, world_size=8, local_rank=1, master_addr="10.0.0.1", master_port=1234, device="cuda")


def test_the_environment_says_where_a_process_stands():
    assert process_environment(PLACE, local_world_size=4) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
    }


def test_a_free_port_is_not_one_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert taken.getsockname()[1] not in {free_port("127.0.0.1") for _ in range(20)}
