import sys

import pytest

from benchmarks.update_pass.ray_stand_in import ray_or_stand_in


def test_a_module_that_names_rays_types_can_be_imported_without_ray(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with ray_or_stand_in(installed=False):
        import ray

        assert list[ray.ObjectRef] == list[object]
        with pytest.raises(ModuleNotFoundError, match=r"ray\.get: Ray is not installed"):
            ray.get(None)
    assert "ray" not in sys.modules


def test_ray_itself_is_used_where_it_is_installed(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with ray_or_stand_in(installed=True):
        assert "ray" not in sys.modules
