#!/usr/bin/env bash
# combined.csv and summary.json from the runs in OUT. It ends with the worst outcome.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
study combine "$@"
