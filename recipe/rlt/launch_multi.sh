#!/usr/bin/env bash
# RLT on the GPUs of one machine: launch_multi.sh [config] [key=value ...]
#   NGPUS=4 bash recipe/rlt/launch_multi.sh memory=large_multi_gpu
# Without a GPU it trains the toy task in one process. recipe/rlt/README.md says more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

default_config=teacher_rlt_multi
devices=${NGPUS:-8}
. recipe/rlt/launch.sh
