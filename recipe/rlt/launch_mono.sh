#!/usr/bin/env bash
# RLT on one GPU: launch_mono.sh [config] [key=value ...]
#   bash recipe/rlt/launch_mono.sh                                      # without a GPU: two tiny models and a toy task
#   bash recipe/rlt/launch_mono.sh teacher_rlt_mono memory=24g          # a profile for your card
#   bash recipe/rlt/launch_mono.sh num_generations=4 max_completion_length=2048
# Any setting goes at the end, under our name or that of the published recipe. recipe/rlt/README.md says more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

default_config=teacher_rlt_mono
devices=1
. recipe/rlt/launch.sh
