#!/usr/bin/env bash
# package_test.sh CASE SOURCE PREFIX WORK [STATIC_BUILD]: tests one way of using the package.
# STATIC_BUILD is the build folder of the case add_subdirectory.
# consumer.cc links headroom::headroom alone, tools_consumer.cc links headroom::tools.
set -euo pipefail
case=$1 source=$2 prefix=$3 work=$4 static_build=${5:-}
here=$source/tests/package
rm -rf "$work" && mkdir -p "$work" "$prefix"
libdir=$(dirname "$(find "$prefix" -name 'libheadroom.so' -o -name 'libheadroom.a' | head -1)")
cxx=${CXX:-g++}
fail() { echo "FAILED: $*"; exit 1; }
# says SENTENCE FILE: CMake breaks lines of its messages where the paths in them happen to end.
says() { tr -s '[:space:]' ' ' <"$2" | grep -q "$1" || fail "$2 does not say '$1'"; }
configure() { cmake -G Ninja -DCMAKE_BUILD_TYPE=Release -S "$1" -B "$work/build" "${@:2}" >/dev/null; }
consumers=(-DCONSUMER_SOURCE="$here/consumer.cc" -DTOOLS_CONSUMER_SOURCE="$here/tools_consumer.cc")

# run_consumers FOLDER: runs both programs. The first must not load the tools.
run_consumers() {
  "$1/consumer"
  "$1/tools_consumer" "$work/run"
  test -s "$work/run/report.html"
  if ldd "$1/consumer" | grep -q libheadroom-tools; then fail "consumer loads libheadroom-tools"; fi
}

# compile COMPILER [pkg-config arguments]: builds both programs with the flags of pkg-config.
compile() {
  local compiler=$1 flags
  flags=$(PKG_CONFIG_PATH=$libdir/pkgconfig pkg-config "${@:2}" --cflags --libs headroom)
  # shellcheck disable=SC2086
  "$compiler" -std=c++20 "$here/consumer.cc" $flags -o "$work/consumer"
  flags=$(PKG_CONFIG_PATH=$libdir/pkgconfig pkg-config "${@:2}" --cflags --libs headroom-tools)
  # shellcheck disable=SC2086
  "$compiler" -std=c++20 "$here/tools_consumer.cc" $flags -o "$work/tools_consumer"
}

# code_block PAGE LANGUAGE [HEADING]: prints the first code block of a language in a page, or after a heading.
code_block() { python3 "$source/tests/docs/blocks.py" "$@"; }

# build_section FILE HEADING PROGRAM: builds the CMake file and the program shown after a heading.
build_section() {
  mkdir -p "$work/source"
  code_block "$1" cmake "$2" >"$work/source/CMakeLists.txt"
  code_block "$1" cpp "$2" >"$work/source/$3"
  test -s "$work/source/$3"
  configure "$work/source" -DCMAKE_PREFIX_PATH="$prefix"
  cmake --build "$work/build" >/dev/null
}

case $case in
  find_package)
    configure "$here/consumer" -DCMAKE_PREFIX_PATH="$prefix" "${consumers[@]}"
    cmake --build "$work/build" >/dev/null
    run_consumers "$work/build"
    ;;
  add_subdirectory)
    configure "$here/subproject" -DHEADROOM_SOURCE="$source" "${consumers[@]}" \
      -DHEADROOM_INSTALL=ON -DHEADROOM_BUILD_C=ON -DCMAKE_CUDA_ARCHITECTURES=90-virtual  # one architecture is enough here
    cmake --build "$work/build" >/dev/null
    run_consumers "$work/build"
    ;;
  static_install)
    cmake --build "$static_build" --target headroom headroom_c headroom_tools >/dev/null
    cmake --install "$static_build/headroom" --prefix "$prefix" >/dev/null
    ;;
  pkg_config)
    compile "$cxx"
    export LD_LIBRARY_PATH=$libdir
    run_consumers "$work"
    ;;
  pkg_config_static)
    # With every installed compiler.
    for compiler in g++ clang++ nvcc /usr/local/cuda/bin/nvcc; do
      command -v "$compiler" >/dev/null || continue
      compile "$compiler" --static
      if ldd "$work/tools_consumer" | grep -q libheadroom; then fail "$compiler did not link the static library"; fi
      run_consumers "$work"
    done
    ;;
  options)
    # Without the C library and the tools, the rest is installed and find_package names what is missing.
    cmake -DHEADROOM_BUILD_C=OFF -DHEADROOM_BUILD_TOOLS=OFF "$static_build" >/dev/null
    cmake --build "$static_build" --target headroom >/dev/null
    cmake --install "$static_build/headroom" --prefix "$prefix" >/dev/null
    left=$(cd "$prefix" && find . -name '*headroom-c[.-]*' -o -name c.h -o -name '*tools*' -o -name record.h)
    [ -z "$left" ] || fail "installed although switched off:" "$left"
    configure "$here/consumer" -DCMAKE_PREFIX_PATH="$prefix" -DCONSUMER_SOURCE="$here/consumer.cc"
    cmake --build "$work/build" >/dev/null
    "$work/build/consumer"
    if configure "$here/consumer" "${consumers[@]}" 2>"$work/tools.log"; then fail "find_package found tools that are not installed"; fi
    says "built without its tools" "$work/tools.log"
    if cmake -G Ninja -S "$here/c_consumer" -B "$work/c" -DCMAKE_PREFIX_PATH="$prefix" -DCONSUMER_SOURCE=none.c \
      >/dev/null 2>"$work/c.log"; then fail "find_package found a C library that is not installed"; fi
    says "built without the C library" "$work/c.log"
    ;;
  readme)
    # The C++ example of the README prints nothing, because no step is skipped.
    code_block README.md cpp >"$work/example.cc"
    test -s "$work/example.cc"
    configure "$here/consumer" -DCMAKE_PREFIX_PATH="$prefix" -DCONSUMER_SOURCE="$work/example.cc"
    cmake --build "$work/build" >/dev/null
    [ -z "$("$work/build/consumer")" ] || fail "the example of the README skips a step"
    # The first example of docs/cpp.md, and its output.
    code_block docs/cpp.md cpp >"$work/example.cc"
    test -s "$work/example.cc"
    cmake --build "$work/build" >/dev/null
    "$work/build/consumer" | tee "$work/output"
    code_block docs/cpp.md output | diff - "$work/output" || fail "docs/cpp.md shows another output"
    # It learns. Without a scale it does not, as the page says: its gradients underflow in FP16.
    last() { awk '/^step 300/ {print $4 < '"$1"' ? "below" : "above"}'; }
    [ "$(last 1e-12 <"$work/output")" = below ]
    sed -i 's/hr::HeadroomScale{}/hr::NoScale{}/' "$work/example.cc"
    cmake --build "$work/build" >/dev/null
    [ "$("$work/build/consumer" | last 4.9e-9)" = above ]
    ;;
  libtorch)
    # The first example of docs/libtorch.md: its CMake file and its program.
    build_section docs/libtorch.md '## First example' fit.cc
    "$work/build/fit" | tee "$work/output"
    grep -q 'applied at scale ' "$work/output"
    ;;
  mpi)
    # The MPI example of docs/scaling.md: its CMake file and its program, on two ranks.
    build_section docs/scaling.md '## MPI' ranks.cc
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    mpirun --oversubscribe -n 2 "$work/build/ranks" | tee "$work/output"
    for rank in 0 1; do
      grep -q "^rank $rank: skipped at scale 65536: rank 1: w: 1 inf, 0 nan" "$work/output"
    done
    ;;
  c)
    # A C program: with CMake and no C++ compiler, with pkg-config, and loaded by dlopen from another
    # folder, as other languages do.
    example=$source/examples/c/train.c
    configure "$here/c_consumer" -DCMAKE_PREFIX_PATH="$prefix" -DCONSUMER_SOURCE="$example"
    cmake --build "$work/build" >/dev/null
    "$work/build/consumer" 50
    flags=$(PKG_CONFIG_PATH=$libdir/pkgconfig pkg-config --cflags --libs headroom-c)
    # shellcheck disable=SC2086
    cc -std=c11 -pedantic -Wall -Wextra -Werror "$example" $flags -lm -o "$work/train"
    LD_LIBRARY_PATH=$libdir "$work/train" 50 >/dev/null
    python3 - "$libdir/libheadroom-c.so" <<'PYTHON'
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.hr_version.restype = ctypes.c_char_p
scaler, scale = ctypes.c_void_p(), ctypes.c_float()
assert library.hr_scaler_create(None, None, ctypes.byref(scaler)) == 0
assert library.hr_scaler_get_scale(scaler, ctypes.byref(scale)) == 0 and scale.value == 65536
assert library.hr_scaler_destroy(scaler) == 0 and library.hr_scaler_destroy(scaler) == 101
print("loaded", library.hr_version().decode())
PYTHON
    ;;
  c_docs)
    # The examples of docs/c.md, except for languages that are not installed.
    export LD_LIBRARY_PATH=$libdir
    code_block docs/c.md c >"$work/step.c"
    test -s "$work/step.c"
    cc -std=c11 -pedantic -Wall -Wextra -Werror "$work/step.c" -I"$prefix/include" -L"$libdir" \
      -lheadroom-c -o "$work/step"
    "$work/step" | tee "$work/output"
    grep -q 'applied at scale 65536' "$work/output"
    if command -v rustc >/dev/null; then
      code_block docs/c.md rust >"$work/step.rs"
      rustc --edition 2021 -L "$libdir" -o "$work/step_rs" "$work/step.rs"
      "$work/step_rs" | tee "$work/output"
      grep -q 'applied at scale 65536' "$work/output"
    fi
    jdk=$(java --version 2>/dev/null || true)
    if [[ $jdk =~ ^(openjdk|java)\ (2[2-9]|[3-9][0-9]) ]]; then
      code_block docs/c.md java >"$work/Step.java"
      (cd "$work" && java --enable-native-access=ALL-UNNAMED Step.java) | tee "$work/output"
      grep -q 'applied at scale 65536' "$work/output"
    fi
    if command -v mcs >/dev/null && command -v mono >/dev/null; then
      code_block docs/c.md csharp >"$work/Step.cs"
      mcs -out:"$work/step.exe" "$work/Step.cs"
      mono "$work/step.exe" | tee "$work/output"
      grep -q 'applied at scale 65536' "$work/output"
    fi
    ;;
  headers)
    # Every public header compiles by itself, as C++17.
    for header in "$prefix"/include/headroom/*.h; do
      case $(basename "$header") in  # these need the headers of torch, MPI, NCCL and CUDA
        libtorch.h | mpi.h | nccl.h) continue ;;
        cuda.h) echo '#include <cuda_bf16.h>' | $cxx -fsyntax-only -x c++ - 2>/dev/null || continue ;;
      esac
      name=headroom/$(basename "$header")
      echo "#include <$name>" | $cxx -std=c++17 -Wall -Wextra -Werror -pedantic -fsyntax-only \
        -I"$prefix/include" -x c++ - || fail "$name does not compile by itself"
    done
    ;;
  misuse)
    $cxx -std=c++20 -fsyntax-only -I"$prefix/include" "$here/misuse.cc"
    for case in INTEGER_VIEW IMPLICIT_WIDENING IMPLICIT_NARROWING COPIED_OPTIMIZER ABSTRACT_OPTIMIZER; do
      if $cxx -std=c++20 -fsyntax-only -I"$prefix/include" -DCASE_$case "$here/misuse.cc" 2>/dev/null
      then fail "misuse $case compiles"; fi
    done
    ;;
  *) echo "unknown case $case"; exit 1 ;;
esac
