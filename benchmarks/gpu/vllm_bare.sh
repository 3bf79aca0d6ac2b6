#!/usr/bin/env bash
# Collects vLLM for a bare GPU machine without internet, small enough to be carried there, on a machine that has internet.
#
#   bash benchmarks/gpu/vllm_bare.sh                into build/vllm_bare, for compute capability 9.0 (H100, H200)
#   bash benchmarks/gpu/vllm_bare.sh FOLDER
#   ARCH=12.0 bash benchmarks/gpu/vllm_bare.sh      for an RTX 5090
#
# The folder gets vLLM's wheel, cut by vllm_bare.py, and the packages of wheels-vllm.txt. Downloads 311 MiB, leaves about 45.
# all.sh installs from it for part 8. The machine has what bare.txt lists, and torch and Python as bare_env.sh says.
# VERSION is vLLM's (default: 0.32.0, the one of the requirements). MOST_MIB bounds the folder (default: 60).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/machine.sh"

ARCH=${ARCH:-9.0}
VERSION=${VERSION:-0.32.0}
FOLDER=${1:-build/vllm_bare}
mkdir -p "$FOLDER"
whole=$(mktemp -d)
trap 'rm -rf "$whole"' EXIT

"$PYTHON" -m pip --disable-pip-version-check --quiet download --no-deps --only-binary=:all: --dest "$whole" \
    --python-version "${PYTHON_VERSION:-3.12}" --platform manylinux_2_28_x86_64 --platform manylinux_2_31_x86_64 "vllm==$VERSION"
"$PYTHON" benchmarks/gpu/vllm_bare.py "$whole"/vllm-*.whl "$FOLDER" --arch "$ARCH"
LISTS=benchmarks/gpu/wheels-vllm.txt MOST_MIB=${MOST_MIB:-60} bash benchmarks/gpu/wheels.sh "$FOLDER"
