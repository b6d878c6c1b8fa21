# Sourced by ./run and ./test: installs what is missing, configures once, builds.
# Everything it prints goes to standard error, so that a command's own output stays clean.

# need PACKAGE...: installs those that are missing.
need() {
  local missing=()
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
      missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "These packages are missing: ${missing[*]}. Install them, or run this as root on Debian." >&2
    exit 1
  fi
  echo "Installing ${missing[*]} ..." >&2
  { apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      "${missing[@]}"; } >/tmp/headroom-install.$$ 2>&1 || {
    cat /tmp/headroom-install.$$ >&2
    exit 1
  }
  rm -f /tmp/headroom-install.$$
}

PACKAGES=(g++ cmake ninja-build pkgconf python3 libhwy-dev nlohmann-json3-dev libdlpack-dev libcli11-dev
          libfmt-dev zlib1g-dev libxxhash-dev libgtest-dev librapidcheck-dev valgrind clang libclang-rt-dev
          libtorch-dev libopenblas0-openmp libgloo-dev libopenmpi-dev openmpi-bin libcairo2-dev fonts-dejavu-core
          python3-dev pybind11-dev python3-numpy python3-pytest)

# build PRESET [TARGET...]: configures when it has to, then builds; says little if all goes well.
build() {
  local preset=$1 log=build/$1.log
  shift
  mkdir -p build
  [ "build/$preset/build.ninja" -nt CMakePresets.json ] || cmake --preset "$preset" >"$log" 2>&1 ||
    { cat "$log" >&2; exit 1; }
  if ! ninja -C "build/$preset" -n "$@" 2>/dev/null | grep -q 'no work to do'; then
    echo "Building ($preset) ..." >&2
    ninja -C "build/$preset" "$@" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
  fi
}
