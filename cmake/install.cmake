# install, find_package(headroom), pkg-config.
include(CMakePackageConfigHelpers)

set(_config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/headroom)
install(TARGETS headroom EXPORT headroom-targets)
install(DIRECTORY include/headroom TYPE INCLUDE
  PATTERN "libtorch*" EXCLUDE PATTERN "mpi.h" EXCLUDE PATTERN "nccl.h" EXCLUDE)
install(EXPORT headroom-targets NAMESPACE headroom:: DESTINATION ${_config_dir})
install(TARGETS headroom_c EXPORT headroom-c-targets)
install(EXPORT headroom-c-targets NAMESPACE headroom:: DESTINATION ${_config_dir})
if(HEADROOM_HAS_LIBTORCH)
  install(TARGETS headroom_libtorch EXPORT headroom-libtorch-targets)
  install(EXPORT headroom-libtorch-targets NAMESPACE headroom:: DESTINATION ${_config_dir})
  install(FILES include/headroom/libtorch.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/headroom)
  install(DIRECTORY include/headroom/libtorch DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/headroom)
endif()
if(HEADROOM_HAS_MPI)
  install(TARGETS headroom_mpi EXPORT headroom-mpi-targets)
  install(EXPORT headroom-mpi-targets NAMESPACE headroom:: DESTINATION ${_config_dir})
  install(FILES include/headroom/mpi.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/headroom)
endif()
if(HEADROOM_HAS_NCCL)
  install(TARGETS headroom_nccl EXPORT headroom-nccl-targets)
  install(EXPORT headroom-nccl-targets NAMESPACE headroom:: DESTINATION ${_config_dir})
  install(FILES include/headroom/nccl.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/headroom)
endif()
configure_package_config_file(cmake/headroom-config.cmake.in headroom-config.cmake
  INSTALL_DESTINATION ${_config_dir})
write_basic_package_version_file(headroom-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/headroom-config.cmake
  ${PROJECT_BINARY_DIR}/headroom-config-version.cmake
  DESTINATION ${_config_dir})

# Relative, so that the file is right wherever the package is installed or moved to.
file(RELATIVE_PATH _prefix_from_pc
  ${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
# What a program links beside the static library. Libraries by name only, since nvcc refuses flags of
# the compiler such as -fopenmp. A shared library has its dependencies by itself.
set(_pc_requires "")
set(_pc_libs "")
if(NOT BUILD_SHARED_LIBS)
  set(_pc_requires libhwy)
  foreach(_name IN LISTS OpenMP_CXX_LIB_NAMES)
    get_filename_component(_dir "${OpenMP_${_name}_LIBRARY}" DIRECTORY)
    # Other compilers look where g++ does, but not the other way round.
    if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU" OR NOT _dir IN_LIST CMAKE_CXX_IMPLICIT_LINK_DIRECTORIES)
      string(APPEND _pc_libs " -L${_dir}")
    endif()
    string(APPEND _pc_libs " -l${_name}")
  endforeach()
  if(HEADROOM_HAS_CUDA)
    get_target_property(_cudart CUDA::cudart_static IMPORTED_LOCATION)
    get_filename_component(_dir "${_cudart}" DIRECTORY)
    string(APPEND _pc_libs " -L${_dir} -lcudart_static -ldl -lrt -lpthread")
  endif()
  string(STRIP "${_pc_libs}" _pc_libs)
endif()
configure_file(cmake/headroom.pc.in headroom.pc @ONLY)
configure_file(cmake/headroom-c.pc.in headroom-c.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/headroom.pc ${PROJECT_BINARY_DIR}/headroom-c.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(HEADROOM_BUILD_CLI)
  install(TARGETS headroom_program)
  if(HEADROOM_HAS_LIBTORCH)
    install(TARGETS headroom_train_program)
  endif()
endif()
