#!/usr/bin/env bash
# symbols_test.sh LIBRARY HEADER: the library exports what symbols.txt lists, the header declares
# the same, and nothing else is visible. A name that was released may never leave the list.
set -euo pipefail
library=$1 header=$2
list=$(dirname "$0")/symbols.txt
exported=$(nm -D --defined-only "$library" | awk '$2 != "A" {print $3}' | sed 's/@@HEADROOM_0$//' | LC_ALL=C sort)
diff <(cat "$list") <(echo "$exported") || { echo "$library does not export what $list lists"; exit 1; }
declared=$(grep -oE '\bhr_[a-z_0-9]+\(' "$header" | tr -d '(' | grep -v '^hr_cpu_tensor$' | LC_ALL=C sort -u)
diff "$list" <(comm -12 <(cat "$list") <(echo "$declared")) ||
  { echo "$header does not declare what $list lists"; exit 1; }
