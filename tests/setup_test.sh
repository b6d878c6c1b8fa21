#!/usr/bin/env bash
# setup_test.sh SOURCE: what ./run and ./test do before they build.
set -euo pipefail
cd "$1"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAILED: $*"; exit 1; }

# An installation that fails: its output is shown, and no link that somebody else has put into the
# temporary folder is written through.
mkdir "$work/bin" "$work/tmp"
printf '#!/bin/sh\necho "broken mirror"\nexit 1\n' >"$work/bin/apt-get"
printf '#!/bin/sh\nexit 1\n' >"$work/bin/dpkg-query"
printf '#!/bin/sh\necho 0\n' >"$work/bin/id"
chmod +x "$work"/bin/*
echo precious >"$work/victim"
# shellcheck disable=SC2016
if PATH=$work/bin:$PATH TMPDIR=$work/tmp bash -c '
    for folder in /tmp "$TMPDIR"; do ln -s "$1/victim" "$folder/headroom-install.$$"; done
    trap "rm -f /tmp/headroom-install.$$" EXIT
    source scripts/setup.sh
    need no-such-package' - "$work" 2>"$work/output"; then
  fail "need succeeded without a package"
fi
grep -q "broken mirror" "$work/output" || fail "the output of apt-get is lost: $(cat "$work/output")"
[ "$(cat "$work/victim")" = precious ] || fail "a planted link was followed"
[ "$(ls "$work/tmp" | wc -l)" = 1 ] || fail "a log was left behind: $(ls "$work/tmp")"

# An environment with all packages is used as it is; one without is made anew.
tag=$(/usr/bin/python3 -c 'import sys; print("py%d.%d" % sys.version_info[:2])')
folder=$work/cache/headroom/torch-1.2.3-$tag
mkdir -p "$folder"
# The file contains the packages that the script installs.
version=1.2.3 bash -c "$(sed -n '/^packages=/,/)$/p' scripts/torch-environment)
  echo \"\${packages[*]}\"" >"$folder/complete"
[ "$(XDG_CACHE_HOME=$work/cache scripts/torch-environment 1.2.3)" = "$folder/bin/python" ] ||
  fail "a complete environment is not used"
echo "1 passed, 0 failed"
