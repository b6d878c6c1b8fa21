#!/usr/bin/env bash
# symbols_test.sh LIBRARY HEADER: the library exports and the header declares exactly the symbols in
# symbols.txt. A released name must never be removed from the list.
set -euo pipefail
library=$1 header=$2
list=$(dirname "$0")/symbols.txt
exported=$(nm -D --defined-only "$library" | awk '$2 != "A" {print $3}')
grep -vq '@@HEADROOM_0$' <<<"$exported" && { echo "$library exports symbols without the HEADROOM_0 version"; exit 1; }
diff "$list" <(sed 's/@@.*//' <<<"$exported" | LC_ALL=C sort) ||
  { echo "the exports of $library differ from $list"; exit 1; }
diff "$list" <(grep -oE '\bhr_[a-z_0-9]+\(' "$header" | tr -d '(' | grep -vx hr_cpu_tensor | LC_ALL=C sort -u) ||
  { echo "the declarations of $header differ from $list"; exit 1; }
