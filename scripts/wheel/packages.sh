# Sourced by scripts/wheels and scripts/arm-test: files of Debian packages of other releases and architectures,
# unpacked into a folder, from the mirror that apt is configured for.

# debian_files ROOT ARCHITECTURE RELEASE "COMPONENTS" PACKAGE...
debian_files() {
  local root=$1 arch=$2 release=$3 components=$4 apt options
  shift 4
  [ "$(cat "$root.complete" 2>/dev/null)" = "$arch $release $*" ] && return
  apt=$root.apt
  rm -rf "$root" "$apt"
  mkdir -p "$root" "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/packages"
  local mirror
  mirror=$(apt-get indextargets --format '$(SITE) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
    awk '$2 ~ /^[a-z]+$/ && $3 == "main" && $1 ~ /\/debian\/?$/ { print $1; exit }')
  local keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  echo "deb [signed-by=$keyring] $mirror $release $components" >"$apt/sources.list"
  : >"$apt/status"
  options=(-o "APT::Architecture=$arch" -o "APT::Architectures=$arch" -o "Dir::Etc::SourceList=$apt/sources.list"
           -o Dir::Etc::SourceParts=/dev/null -o "Dir::State=$apt" -o "Dir::State::status=$apt/status"
           -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update -qq
  (cd "$apt/packages" && apt-get "${options[@]}" download -qq "$@")
  local package link target
  for package in "$apt"/packages/*.deb; do dpkg -x "$package" "$root"; done
  find "$root" -type l | while read -r link; do  # absolute links point into this folder
    target=$(readlink "$link")
    case $target in /*) ln -sfn "$root$target" "$link" ;; esac
  done
  echo "$arch $release $*" >"$root.complete"
}

# debian_source FOLDER PACKAGE: the upstream source of a package of this release.
debian_source() {
  local folder=$1 package=$2 options
  [ -e "$folder.complete" ] && return
  rm -rf "$folder" "$folder.apt"
  mkdir -p "$folder" "$folder.apt/lists/partial" "$folder.apt/cache/archives/partial"
  sed 's/^Types: deb$/Types: deb-src/; s/^deb /deb-src /' /etc/apt/sources.list.d/debian.sources \
    >"$folder.apt/sources.sources"
  options=(-o "Dir::Etc::SourceList=/dev/null" -o "Dir::Etc::SourceParts=$folder.apt" -o "Dir::State=$folder.apt"
           -o "Dir::Cache=$folder.apt/cache" -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update -qq
  (cd "$folder.apt" && apt-get "${options[@]}" source --download-only -qq "$package")
  tar -xf "$(ls "$folder.apt"/*.orig.tar.*)" -C "$folder" --strip-components 1
  touch "$folder.complete"
}

# static_highway FOLDER SOURCE [CMAKE ARGUMENT...]: builds Highway as a static library that can go into a shared one,
# and a hwy-config.cmake for it in FOLDER, which Debian does not have.
static_highway() {
  local folder=$1 source=$2
  shift 2
  [ -e "$folder/hwy-config.cmake" ] && return
  cmake -G Ninja -S "$source" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DHWY_ENABLE_TESTS=OFF -DHWY_ENABLE_EXAMPLES=OFF -DHWY_ENABLE_CONTRIB=OFF -DHWY_ENABLE_INSTALL=OFF \
    -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DCMAKE_CXX_FLAGS=-fvisibility=hidden "$@"
  ninja -C "$folder/build" hwy
  cat >"$folder/hwy-config.cmake" <<EOF
add_library(hwy::hwy STATIC IMPORTED)
set_target_properties(hwy::hwy PROPERTIES
  IMPORTED_LOCATION $folder/build/libhwy.a INTERFACE_INCLUDE_DIRECTORIES $source)
EOF
}
