"""Part 8 of the GPU command: what is left of steps that fail, hang or die, and a wheel cut to one kind of GPU."""

import csv
import io
import json
import subprocess
import sys
import time
import zipfile

import psutil
import pytest

from benchmarks.gpu.vllm_bare import CODE, CONTAINER, ENTRY, MAGIC, PTX, capability, cut_wheel, for_one_arch
from benchmarks.gpu.vllm_part import STEPS, Evidence, parse, run_steps
from tests.end_to_end.runs import ROOT, script_environment


def rows(out):
    return [json.loads(line) for line in (out / "vllm.jsonl").read_text().splitlines()]


def python(code, *arguments):
    return [sys.executable, "-c", code, *map(str, arguments)]


def test_a_step_that_fails_hangs_or_dies_keeps_its_evidence_and_does_not_stop_the_next(tmp_path):
    note = 'import os, sys, time; open(sys.argv[1], \'a\').write(\'{"step": "%s", "figure": 1}\\n\'); '
    evidence = tmp_path / "vllm.jsonl"
    commands = {
        "fails": python(note % "fails" + "raise ValueError('no such thing')", evidence),
        "hangs": python(note % "hangs" + "print('waiting', flush=True); time.sleep(600)", evidence),
        "dies": python(note % "dies" + "os.abort()", evidence),
        "counts": python("import sys; print(len(open(sys.argv[1]).readlines()))", evidence),
    }
    ended = run_steps(commands, {"fails": 60, "hangs": 3, "dies": 60, "counts": 60}, tmp_path, 200)
    assert ended == {"fails": "failed", "hangs": "out of time", "dies": "failed", "counts": "done"}
    # Two lines of each step before it: its figure, and how it ended.
    assert (tmp_path / "counts.log").read_text() == "6\n"
    assert [row["step"] for row in rows(tmp_path)] == ["fails"] * 2 + ["hangs"] * 2 + ["dies"] * 2 + ["counts"]
    assert "ValueError: no such thing" in rows(tmp_path)[1]["error"]
    assert "Traceback" in (tmp_path / "fails.log").read_text()
    assert "waiting" in rows(tmp_path)[3]["error"]
    assert "out of time" in (tmp_path / "vllm.txt").read_text()


def test_a_step_that_hangs_takes_the_processes_that_it_started_with_it(tmp_path):
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    run_steps({"hangs": python(child)}, {"hangs": 3}, tmp_path, 100)
    pid = int((tmp_path / "hangs.log").read_text())
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} outlives its step")


def test_steps_share_the_seconds_of_the_part_and_one_without_any_is_not_begun(tmp_path):
    commands = {"long": python("import time; time.sleep(600)"), "late": python("pass")}
    assert run_steps(commands, {"long": 500, "late": 500}, tmp_path, 2) == {"long": "out of time", "late": "not begun"}
    assert [row["status"] for row in rows(tmp_path)] == ["out of time", "not begun"]


def test_evidence_is_on_disk_when_the_call_returns(tmp_path):
    Evidence(tmp_path).write("engine", "tokens are equal", equal_share=1.0)
    assert rows(tmp_path) == [{"step": "engine", "equal_share": 1.0}]
    assert (tmp_path / "vllm.txt").read_text() == "engine: tokens are equal\n"


def test_the_steps_go_from_the_engine_alone_to_whole_runs():
    order = ["engine", "sleep", "sync", "shared", "shared_graphs", "toy", "card", "speed"]
    assert parse(["--out", "folder"]).chosen == list(STEPS) == order


@pytest.mark.slow
def test_weights_are_shared_and_synced_on_a_cpu_with_small_shapes(tmp_path):
    small = {"LAYERS": "1", "VOCABULARY": "512", "SHRINK": "32", "PROMPT": "16", "RESPONSE": "8", "ANSWERS": "4"}
    env = script_environment(OUT=str(tmp_path), VLLM_STEPS="engine shared", **small)
    command = ["bash", "benchmarks/gpu/vllm.sh"]
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    found = rows(tmp_path)
    assert [row["model"] for row in found if "model" in row] == ["tiny", "0.6b"]
    assert [row["step_number"] for row in found if "step_number" in row] == [1, 2, 3]
    assert [row["status"] for row in found if "status" in row] == ["done", "done"]


# The wheel.


def container(*entries):
    """Device code as nvcc lays it out: a header, and for each (kind, arch, content) a header of 64 bytes and the content."""
    body = b"".join(
        ENTRY.pack(kind, 0, 64, len(content), 0, 0, arch).ljust(64, b"\1") + content for kind, arch, content in entries
    )  # fmt: skip
    return CONTAINER.pack(int.from_bytes(MAGIC, "little"), 1, CONTAINER.size, len(body)) + body


def test_what_the_gpu_loads_stays_and_everything_else_of_a_library_keeps_its_place():
    host = b"\x7fELF and more " + MAGIC + b" by chance"
    own = container((PTX, 80, b"ptx80"), (CODE, 80, b"code80"), (CODE, 90, b"code90"))
    same_generation = container((CODE, 80, b"old80"), (CODE, 86, b"old86"), (CODE, 90, b"new90"))
    only_ptx = container((PTX, 70, b"ptx70"), (PTX, 80, b"text80"), (CODE, 75, b"code75"))
    library = host + own + b"between" + same_generation + only_ptx

    cut = for_one_arch(library, 90)
    assert len(cut) == len(library)
    kept = [
        word
        for word in (b"ptx80", b"code80", b"code90", b"old80", b"old86", b"new90", b"ptx70", b"text80", b"code75")
        if word in cut
    ]
    assert kept == [b"code90", b"new90", b"text80"]
    assert cut.startswith(host)
    assert b"between" in cut
    assert b"old86" in for_one_arch(library, 89)
    assert [len(part) for part in (cut, for_one_arch(cut, 90))] == [len(library)] * 2
    assert for_one_arch(cut, 90) == cut


def test_the_cut_wheel_has_what_one_gpu_needs_and_lists_it(tmp_path):
    name = "vllm-0.0-cp38-abi3-linux_x86_64.whl"
    config = "vllm/layers/configs/E=1,N=2.json"
    files = {
        "vllm/__init__.py": b"x = 1\n", "vllm/layers/a,b.json": b"{}", config: b"{}", "vllm/big.hpp": b"//",
        "vllm/_C_stable_libtorch.abi3.so": container((CODE, 80, b"code80"), (CODE, 120, b"code120")),
        "vllm/cumem_allocator.abi3.so": b"\x7fELF", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": b"\x7fELF",
        "vllm-0.0.dist-info/METADATA": b"Name: vllm\n", "vllm-0.0.dist-info/RECORD": b"",
    }  # fmt: skip
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        for file, content in files.items():
            wheel.writestr(file, content)
    (tmp_path / "out").mkdir()
    cut_wheel(tmp_path / name, tmp_path / "out" / name, capability("12.0"))
    with zipfile.ZipFile(tmp_path / "out" / name) as cut:
        kernels = cut.read("vllm/_C_stable_libtorch.abi3.so")
        listed = [row[0] for row in csv.reader(io.StringIO(cut.read("vllm-0.0.dist-info/RECORD").decode()))]
        assert sorted(listed) == sorted(cut.namelist())
    assert (b"code120" in kernels, b"code80" in kernels) == (True, False)
    gone = {config, "vllm/big.hpp", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"}
    assert set(listed) == set(files) - gone | {"vllm/vllm_flash_attn/_vllm_fa2_C.py"}


def test_a_wheel_for_a_cpu_and_a_name_that_is_no_architecture_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        wheel.writestr("vllm/__init__.py", "")
    with pytest.raises(SystemExit, match="Take a wheel of vllm for CUDA"):
        cut_wheel(tmp_path / "vllm.whl", tmp_path / "cut.whl", 90)
    assert [capability(text) for text in ("9.0", "sm_90", "120")] == [90, 90, 120]
    with pytest.raises(SystemExit, match="--arch hopper"):
        capability("hopper")
