#!/usr/bin/env bash
# package_test.sh CASE SOURCE PREFIX WORK: one way in which a user meets the package.
set -euo pipefail
case=$1 source=$2 prefix=$3 work=$4
here=$source/tests/package
rm -rf "$work" && mkdir -p "$work"
libdir=$(dirname "$(find "$prefix" -name 'libheadroom.so' -o -name 'libheadroom.a' | head -1)")
cxx=${CXX:-g++}
configure() { cmake -G Ninja -DCMAKE_BUILD_TYPE=Release -S "$1" -B "$work/build" "${@:2}" >/dev/null; }

case $case in
  find_package)
    configure "$here/consumer" -DCMAKE_PREFIX_PATH="$prefix" -DCONSUMER_SOURCE="$here/consumer.cc"
    cmake --build "$work/build" >/dev/null
    "$work/build/consumer"
    ;;
  add_subdirectory)
    configure "$here/subproject" -DHEADROOM_SOURCE="$source" -DCONSUMER_SOURCE="$here/consumer.cc"
    cmake --build "$work/build" >/dev/null
    "$work/build/consumer"
    ;;
  pkg_config)
    flags=$(PKG_CONFIG_PATH=$libdir/pkgconfig pkg-config --cflags --libs headroom)
    # shellcheck disable=SC2086
    $cxx -std=c++20 "$here/consumer.cc" $flags -o "$work/consumer"
    LD_LIBRARY_PATH=$libdir "$work/consumer"
    ;;
  readme)
    # The first C++ example of the README, just as it stands there.
    awk '/^```cpp$/ {on = 1; next} /^```$/ {if (on) exit} on' "$source/README.md" >"$work/example.cc"
    test -s "$work/example.cc"
    configure "$here/consumer" -DCMAKE_PREFIX_PATH="$prefix" -DCONSUMER_SOURCE="$work/example.cc"
    cmake --build "$work/build" >/dev/null
    "$work/build/consumer" | tee "$work/output"
    grep -q 'loss' "$work/output"
    ;;
  libtorch)
    # The LibTorch quick start of the README: its CMake file and its program.
    section() { awk -v fence="\`\`\`$1" '/^## LibTorch$/ {inside = 1}
      inside && !done && $0 == fence {on = 1; next} /^```$/ {done = done || on; on = 0} on' \
      "$source/README.md"; }
    mkdir -p "$work/source"
    section cmake >"$work/source/CMakeLists.txt"
    section cpp >"$work/source/fit.cc"
    test -s "$work/source/fit.cc"
    configure "$work/source" -DCMAKE_PREFIX_PATH="$prefix"
    cmake --build "$work/build" >/dev/null
    "$work/build/fit" | tee "$work/output"
    grep -q 'applied at scale ' "$work/output"
    ;;
  headers)
    # Every public header stands alone, and C++17 is enough for a user.
    for header in "$prefix"/include/headroom/*.h; do
      [ "$(basename "$header")" = libtorch.h ] && continue  # needs torch's; case libtorch includes it
      name=headroom/$(basename "$header")
      echo "#include <$name>" | $cxx -std=c++17 -Wall -Wextra -Werror -pedantic -fsyntax-only \
        -I"$prefix/include" -x c++ - || { echo "$name does not stand alone"; exit 1; }
    done
    ;;
  misuse)
    $cxx -std=c++20 -fsyntax-only -I"$prefix/include" "$here/misuse.cc"
    for case in INTEGER_VIEW IMPLICIT_WIDENING IMPLICIT_NARROWING COPIED_OPTIMIZER ABSTRACT_OPTIMIZER; do
      if $cxx -std=c++20 -fsyntax-only -I"$prefix/include" -DCASE_$case "$here/misuse.cc" 2>/dev/null
      then echo "misuse $case compiled"; exit 1; fi
    done
    ;;
  *) echo "unknown case $case"; exit 1 ;;
esac
