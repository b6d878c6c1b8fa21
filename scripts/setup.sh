# Sourced by ./run and ./test: installs missing packages, configures and builds. Prints to standard error only, so that
# standard output contains nothing but the command's own output.

# quietly COMMAND...: shows the command's output only if it fails.
quietly() {
  local log
  log=$(mktemp) || return 1
  "$@" >"$log" 2>&1 && { rm -f "$log"; return 0; }
  cat "$log" >&2
  rm -f "$log"
  return 1
}

apt_install() {
  apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

# need PACKAGE...: installs missing Debian packages.
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
  quietly apt_install "${missing[@]}" || exit 1
}

PACKAGES=(g++ cmake ninja-build pkgconf python3 libhwy-dev nlohmann-json3-dev libdlpack-dev libcli11-dev
          libfmt-dev zlib1g-dev libxxhash-dev libgtest-dev librapidcheck-dev valgrind clang libclang-rt-dev
          libtorch-dev libopenblas0-openmp libgloo-dev libopenmpi-dev openmpi-bin libcairo2-dev fonts-dejavu-core
          python3-dev python3-venv python3-numpy python3-pytest)

# build PRESET [TARGET...]: configures if necessary, then builds; prints the log only on failure.
build() {
  local preset=$1 log=build/$1.log
  shift
  mkdir -p build
  [ "build/$preset/build.ninja" -nt CMakePresets.json ] || cmake --preset "$preset" -DHEADROOM_UNITY=ON >"$log" 2>&1 ||
    { cat "$log" >&2; exit 1; }
  if ! ninja -C "build/$preset" -n "$@" 2>/dev/null | grep -q 'no work to do'; then
    echo "Building ($preset) ..." >&2
    ninja -C "build/$preset" "$@" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
  fi
}
