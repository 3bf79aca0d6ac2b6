#!/usr/bin/env bash
# Takes vLLM's allocator of memory that can sleep out of a wheel, for tests on a machine without vLLM. Nothing of it is committed.
#   benchmarks/gpu/cumem.sh WHEEL FOLDER
#   VERL_MEMOPT_CUMEM=FOLDER make gpu-tests
# WHEEL: a vllm wheel for the machine's CUDA. FOLDER gets one library and the Python files beside it.
# PYTHON: the interpreter (default .venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ $# != 2 ]]; then
    echo "usage: benchmarks/gpu/cumem.sh WHEEL FOLDER" >&2
    exit 2
fi
"${PYTHON:-.venv/bin/python}" - "$1" "$2" <<'EXTRACT'
import sys
import zipfile
from pathlib import Path

wheel, folder = map(Path, sys.argv[1:])
with zipfile.ZipFile(wheel) as archive:
    names = [n for n in archive.namelist() if n.startswith(("vllm/cumem_allocator", "vllm/device_allocator/")) and not n.endswith("/")]
    if not any(name.startswith("vllm/cumem_allocator") for name in names):
        sys.exit(f"{wheel}: it has no vllm/cumem_allocator library. Take a wheel of vllm for CUDA.")
    for name in names:
        target = folder / Path(name).relative_to("vllm")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(archive.read(name))
print(f"{folder}: {len(names)} files")
EXTRACT
