#!/usr/bin/env bash
# The four charts of the results in OUT.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
study charts "$@"
