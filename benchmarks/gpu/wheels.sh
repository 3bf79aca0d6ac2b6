#!/usr/bin/env bash
# Collects the wheels that a bare GPU machine without internet lacks, on a machine that has internet.
#
#   bash benchmarks/gpu/wheels.sh                        into build/wheels, for Python 3.12 on Linux x86-64
#   bash benchmarks/gpu/wheels.sh FOLDER
#   PYTHON_VERSION=3.11 bash benchmarks/gpu/wheels.sh    for another Python
#   PEERS=0 bash benchmarks/gpu/wheels.sh                without the peers of benchmarks/update_pass
#   LISTS=FILE bash benchmarks/gpu/wheels.sh FOLDER      what FILE lists alone, as vllm_bare.sh does
#
# Prints the size of the folder, and fails above MOST_MIB (default: 40). all.sh installs from the folder.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/machine.sh"

PYTHON_VERSION=${PYTHON_VERSION:-3.12}
PEERS=${PEERS:-1}
MOST_MIB=${MOST_MIB:-40}
FOLDER=${1:-build/wheels}
mkdir -p "$FOLDER"

lists=(${LISTS:-benchmarks/gpu/wheels.txt})
[ "$PEERS" = 0 ] || [ -n "${LISTS:-}" ] || lists+=(benchmarks/gpu/wheels-peers.txt)
pip() { "$PYTHON" -m pip --disable-pip-version-check --quiet "$@"; }

requirements=$(grep --no-filename -v '^#' "${lists[@]}")
for requirement in $requirements; do
    case $requirement in
    antlr4-python3-runtime==*)
        # Published as source only; it is pure Python, so its wheel suits every Python.
        pip wheel --no-deps --wheel-dir "$FOLDER" "$requirement" ;;
    *)
        pip download --no-deps --only-binary=:all: --dest "$FOLDER" --python-version "$PYTHON_VERSION" \
            --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_26_x86_64 \
            --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 "$requirement" ;;
    esac
done

mib=$(du --summarize --apparent-size --block-size=1K "$FOLDER" | awk '{printf "%.1f", $1 / 1024}')
echo "$FOLDER: $(find "$FOLDER" -name '*.whl' | wc -l) wheels for Python $PYTHON_VERSION, $mib MiB"
if awk "BEGIN { exit !($mib > $MOST_MIB) }"; then
    echo "wheels.sh: more than MOST_MIB=$MOST_MIB. Empty the folder, shorten the lists, or raise MOST_MIB." >&2
    exit 1
fi
