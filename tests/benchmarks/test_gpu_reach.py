"""The search for the longest response: which lengths it tries, and what it says where nothing fits."""

import json

import pytest
import torch

from benchmarks.gpu.reach import FINE, FITS, OUT_OF_MEMORY, STEP, Known, Prober, case_of, next_length, parse, write_report
from benchmarks.gpu.reach_cases import SHAPES, WAYS, Case, case_settings, computed_peak, make_folder, size_of
from verl_memopt.memory.lora import adapter_params
from verl_memopt.model.weights import WeightFolder
from verl_memopt.plan.formulas import Pass, Shapes

SMALL = {"prompt": 16, "layers": 2, "vocabulary": 512, "shrink": 32}


def searched(limit, start=1024, most=40_000):
    """Gives (lengths tried, what is known) where every length up to ``limit`` fits."""
    outcomes = []
    while (length := next_length(Known.of(outcomes), start, most)) is not None:
        outcomes.append((length, length <= limit))
    return [length for length, _ in outcomes], Known.of(outcomes)


@pytest.mark.parametrize("limit", [0, 64, 1025, 17_000, 39_000])
def test_the_search_ends_beside_the_limit(limit):
    tried, known = searched(limit)
    assert known.fits <= limit
    assert all(length % STEP == 0 for length in tried)
    assert len(tried) == len(set(tried)) <= 14
    if known.fails is None:
        assert limit - known.fits < STEP or known.fits == 39_936
    else:
        assert limit < known.fails <= known.fits + max(STEP, known.fails // FINE)


def test_the_search_doubles_until_something_does_not_fit_then_halves_and_tries_nothing_beyond_the_model():
    assert searched(5000)[0][:5] == [1024, 2048, 4096, 8192, 6144]
    tried, known = searched(10**9, most=3000)
    assert (tried, known.fails) == ([1024, 2048, 2944], None)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shapes_are_those_that_are_published(shape):
    """Parameters of Qwen3 by its model cards, embeddings included, in billions."""
    published = {"0.6b": 0.596, "1.7b": 1.721, "4b": 4.022, "8b": 8.191}
    case = Case(shape, "full")
    assert size_of(case.model).params / 1e9 == pytest.approx(published[shape], abs=6e-4)


@pytest.mark.parametrize("shape", ["0.6b", "8b"])
def test_a_model_folder_has_the_counted_parameters_and_reads_as_zeros_and_ones(tmp_path, shape):
    case = Case(shape, "lora", **SMALL)
    folder = make_folder(case, tmp_path / "model")
    weights = WeightFolder(folder)
    assert sum(torch.Size(weights.shape(name)).numel() for name in weights.names) == size_of(case.model).params
    assert weights.read("model.norm.weight", ()).eq(1).all()
    assert weights.read("model.layers.1.mlp.up_proj.weight", ()).eq(0).all()


@pytest.fixture
def probed(tmp_path):
    """Gives (what two probes of a case say, one within the limit and one beyond)."""
    case = case_of(parse(["--out", str(tmp_path), "--limit-gb", "0.002", *_small_options()]), "0.6b/lora")
    prober = Prober(case, make_folder(case, tmp_path / "model"))
    probes = [prober.probe(64), prober.probe(2048), prober.probe(64)]
    # Adapters are counted on the model that was built.
    adapters = [p for p in prober._group._worker.policy.model.parameters() if p.requires_grad]
    prober.close()
    return case, probes, sum(parameter.numel() for parameter in adapters)


def test_a_probe_that_does_not_fit_names_its_phase_and_the_next_one_runs(probed, tmp_path):
    case, (first, beyond, again), adapters = probed
    assert [first["status"], beyond["status"], again["status"]] == [FITS, OUT_OF_MEMORY, FITS]
    assert beyond["phase"] in ("old_log_prob", "ref", "update_actor")
    assert "2.05 MiB" in beyond["message"]
    assert again["update_peak_bytes"] == first["update_peak_bytes"]
    assert first["phases"].keys() == {"gen", "old_log_prob", "ref", "update_actor", "update_weights"}
    roles = case_settings(case, "none", 64).actor_rollout_ref
    assert adapters == adapter_params(Shapes.of(size_of(case.model), roles, Pass(1, 1, 1, 1), "cpu"))
    (tmp_path / "probes.jsonl").write_text("".join(json.dumps(probe) + "\n" for probe in (first, beyond)))
    write_report(tmp_path, [case])
    (found,) = json.loads((tmp_path / "reach.json").read_text())["cases"]
    assert (found["longest"], found["shortest_that_fails"]) == (64, 2048)
    assert "not searched to the end" in (tmp_path / "reach.txt").read_text()


@pytest.mark.parametrize("way", WAYS)
def test_the_computed_peak_grows_with_tokens_and_holds_the_parameters(way):
    case = Case("1.7b", way)
    short, long = (computed_peak(case, case_settings(case, "none", response)) for response in (1024, 16_384))
    params = size_of(case.model).params * 2  # the profile holds masters of all weights as a remainder, on the host
    assert params < short < long


def _small_options():
    return [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
