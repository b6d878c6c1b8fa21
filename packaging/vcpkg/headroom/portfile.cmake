# An overlay port that builds the clone it is in: vcpkg install headroom --overlay-ports=packaging/vcpkg
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

vcpkg_check_features(OUT_FEATURE_OPTIONS FEATURE_OPTIONS
  FEATURES
    cuda HEADROOM_CUDA
    libtorch HEADROOM_LIBTORCH
)
vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS
    ${FEATURE_OPTIONS}
    -DHEADROOM_BUILD_CLI=OFF
    -DHEADROOM_BUILD_TESTS=OFF
    -DHEADROOM_MPI=OFF
    -DHEADROOM_NCCL=OFF
    -DHEADROOM_PYTHON=OFF
    -DHEADROOM_WERROR=OFF
)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/headroom)
vcpkg_fixup_pkgconfig()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
