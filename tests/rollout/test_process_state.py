from __future__ import annotations

import os
import random
import signal
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.rollout.conftest import SharedVllm
from verl_memopt.rollout.vllm_memory import default_group_kept, process_state_kept, random_state_kept

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


def seed_all() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def test_every_random_generator_goes_on_where_it_was() -> None:
    seed_all()
    expected = [draw(), draw()]
    seed_all()
    first = draw()
    with random_state_kept(CPU):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        draw()
    assert [first, draw()] == expected


def test_what_a_start_changes_is_given_back_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "old")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    before = (torch.get_num_threads(), torch.set_num_threads, torch.get_default_dtype(), torch.get_float32_matmul_precision())
    hook, handler, filters = sys.excepthook, signal.getsignal(signal.SIGTERM), list(warnings.filters)

    def disturb() -> None:
        with process_state_kept(CPU, own_prefix="ENGINE_"):
            torch.set_num_threads(before[0] + 1)
            torch.set_num_threads = print
            torch.set_default_dtype(torch.float64)
            torch.set_float32_matmul_precision("medium")
            sys.excepthook = print  # type: ignore[assignment]
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            warnings.simplefilter("error")
            os.environ.update(KEPT="new", LD_PRELOAD="x.so", ENGINE_OWN="stays")
            raise ValueError("start failed")

    with pytest.raises(ValueError, match="start failed"):
        disturb()
    after = (torch.get_num_threads(), torch.set_num_threads, torch.get_default_dtype(), torch.get_float32_matmul_precision())
    assert after == before
    assert (sys.excepthook, signal.getsignal(signal.SIGTERM), list(warnings.filters)) == (hook, handler, filters)
    assert os.environ["KEPT"] == "old"
    assert "LD_PRELOAD" not in os.environ
    assert os.environ.pop("ENGINE_OWN") == "stays"


@pytest.mark.parametrize("keep", [True, False])
def test_the_default_group_outlives_an_engines_clean_up_only_when_it_is_the_callers(keep: bool, shared_vllm: SharedVllm) -> None:
    shared_vllm.close()  # it may hold a default group of its own
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    own = dist.new_group([0])
    with default_group_kept(keep):
        dist.destroy_process_group(own)
        dist.destroy_process_group()
    assert dist.is_initialized() == keep
    if keep:
        dist.destroy_process_group()
