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

# PACKAGES suffice for the program (./run); TEST_PACKAGES are all others that the tests need.
PACKAGES=(g++ cmake ninja-build pkgconf libhwy-dev nlohmann-json3-dev libdlpack-dev libcli11-dev libfmt-dev zlib1g-dev
          libxxhash-dev libtorch-dev libopenblas0-openmp libcairo2-dev fonts-dejavu-core)
# shellcheck disable=SC2034
TEST_PACKAGES=(python3 libgtest-dev librapidcheck-dev valgrind clang libclang-rt-dev libgloo-dev libopenmpi-dev openmpi-bin
               python3-dev python3-venv python3-numpy python3-pytest zsh fish)

# python_tools NAME PACKAGE...: prints the folder of a virtual environment with packages from PyPI, in
# ${XDG_CACHE_HOME:-~/.cache}/headroom. The first call makes it.
python_tools() {
  local folder=${XDG_CACHE_HOME:-${HOME:-$PWD}/.cache}/headroom/$1 python=/usr/bin/python3 install
  shift
  [ -x $python ] || python=python3
  mkdir -p "$(dirname "$folder")"
  exec 9>"$folder.lock"
  flock 9  # another script may be installing it
  if [ ! -f "$folder/complete" ]; then
    rm -rf "$folder"
    echo "Installing $* into $folder ..." >&2
    "$python" -m venv "$folder" >&2
    install=("$folder/bin/pip" install --quiet --no-cache-dir --disable-pip-version-check "$@")
    "${install[@]}" >&2 || "${install[@]}" >&2
    touch "$folder/complete"
  fi
  exec 9>&-
  echo "$folder"
}

# configure PRESET OPTION...: the log is printed only on failure. Where no GPU can run it, code is made for the oldest one
# and, as PTX, for the newest: enough to see that it compiles, in half the time.
configure() {
  local log=build/$1.log architectures=()
  [ -e /dev/nvidia0 ] || architectures=("-DCMAKE_CUDA_ARCHITECTURES=75-real;90-virtual")
  mkdir -p build
  cmake --preset "$1" -DHEADROOM_UNITY=ON "${architectures[@]}" "${@:2}" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
}

compile() {
  local log=build/$1.log
  ninja -C "build/$1" -n "${@:2}" 2>/dev/null | grep -q 'no work to do' && return
  echo "Building ($1) ..." >&2
  ninja -C "build/$1" "${@:2}" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
}

# build PRESET [TARGET...]: configures if necessary, then builds. A folder that build_program has made is completed.
build() {
  local cache=build/$1/CMakeCache.txt
  if grep -qs '^HEADROOM_BUILD_TESTS:BOOL=OFF' "$cache"; then
    configure "$1" -DHEADROOM_BUILD_TESTS=ON -DHEADROOM_BUILD_C=ON -DHEADROOM_PYTHON=AUTO -DHEADROOM_CUDA=AUTO
  elif [ ! "build/$1/build.ninja" -nt CMakePresets.json ]; then
    configure "$1"
  fi
  compile "$@"
}

# build_program: builds the program and the trainer, without tests and Python, and without CUDA where there is no GPU.
build_program() {
  local cuda=OFF
  [ ! -e /dev/nvidia0 ] || cuda=AUTO
  [ -e build/release/build.ninja ] ||
    configure release -DHEADROOM_BUILD_TESTS=OFF -DHEADROOM_BUILD_C=OFF -DHEADROOM_PYTHON=OFF -DHEADROOM_CUDA=$cuda
  compile release headroom_program
}
