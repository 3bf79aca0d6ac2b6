#!/usr/bin/env bash
# The whole study: every method at k = 2, 4, 8, what really saves up to k = 64, the tables, the charts. --quick: k = 2, 4, 8 once.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
study study "${measure[@]}" "$@"
