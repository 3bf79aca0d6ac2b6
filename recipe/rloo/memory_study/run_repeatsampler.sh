#!/usr/bin/env bash
# The published method RepeatSampler: algorithm.expansion=repeat_sampler. Variables: common.sh.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
one_method repeat_sampler "$@"
