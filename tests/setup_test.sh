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
# ./run installs and builds the program alone; ./test completes its folder, and ./run leaves a complete one as it is.
mkdir "$work/tools" "$work/tree"
printf '#!/bin/sh\necho "$@" >>"%s/configured"\nmkdir -p build/release && touch build/release/build.ninja\n' "$work" >"$work/tools/cmake"
printf '#!/bin/sh\necho "no work to do"\n' >"$work/tools/ninja"
chmod +x "$work"/tools/*
# shellcheck disable=SC2016
PATH=$work/tools:$PATH bash -c '
  source "$1/scripts/setup.sh"
  for needless in clang valgrind libopenmpi-dev libgloo-dev libgtest-dev python3-dev; do
    [[ " ${PACKAGES[*]} " != *" $needless "* ]] || { echo "./run installs $needless"; exit 1; }
  done
  cd "$2/tree" && touch CMakePresets.json
  build_program
  echo "HEADROOM_BUILD_TESTS:BOOL=OFF" >build/release/CMakeCache.txt
  build release
  echo "HEADROOM_BUILD_TESTS:BOOL=ON" >build/release/CMakeCache.txt
  build_program
' - "$PWD" "$work" || fail "build_program or build"
[ "$(grep -c . "$work/configured")" = 2 ] || fail "configured: $(cat "$work/configured")"
head -1 "$work/configured" | grep -q -- "-DHEADROOM_BUILD_TESTS=OFF .*-DHEADROOM_PYTHON=OFF" || fail "./run configures tests"
tail -1 "$work/configured" | grep -q -- "-DHEADROOM_BUILD_TESTS=ON .*-DHEADROOM_PYTHON=AUTO" || fail "./test does not complete the folder"
echo "2 passed, 0 failed"
