#!/usr/bin/env bash
# symbols_test.sh LIBRARY HEADER: the library exports what symbols.txt lists, the header declares
# the same, and nothing else is visible. A name that was released may never leave the list.
set -euo pipefail
library=$1 header=$2
list=$(dirname "$0")/symbols.txt
exported=$(nm -D --defined-only "$library" | awk '$2 != "A" {print $3}')
grep -vq '@@HEADROOM_0$' <<<"$exported" && { echo "$library has symbols without its version"; exit 1; }
diff "$list" <(sed 's/@@.*//' <<<"$exported" | LC_ALL=C sort) ||
  { echo "$library does not export what $list lists"; exit 1; }
diff "$list" <(grep -oE '\bhr_[a-z_0-9]+\(' "$header" | tr -d '(' | grep -vx hr_cpu_tensor | LC_ALL=C sort -u) ||
  { echo "$header does not declare what $list lists"; exit 1; }
