# Finds NCCL in the system or in pip's packages. Sets HEADROOM_HAS_NCCL and defines the target
# headroom_find_nccl.
set(HEADROOM_HAS_NCCL OFF)
if(HEADROOM_NCCL STREQUAL "OFF" OR NOT HEADROOM_HAS_CUDA)
  return()
endif()
find_program(_python NAMES python3 python NO_CACHE)
if(_python)
  execute_process(
    COMMAND ${_python} -c "import nvidia.nccl as n; print(list(n.__path__)[0])"
    OUTPUT_VARIABLE _pip OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ENV NCCL_HOME ${_pip}
  PATHS /usr/local/cuda ${CUDAToolkit_TARGET_DIR} PATH_SUFFIXES include)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ENV NCCL_HOME ${_pip}
  PATHS /usr/local/cuda ${CUDAToolkit_TARGET_DIR} PATH_SUFFIXES lib lib64)
if(NOT NCCL_INCLUDE_DIR OR NOT NCCL_LIBRARY)
  if(HEADROOM_NCCL STREQUAL "ON")
    message(FATAL_ERROR "HEADROOM_NCCL is ON, but nccl.h or libnccl is not found; set NCCL_HOME, or "
      "NCCL_INCLUDE_DIR and NCCL_LIBRARY.")
  endif()
  return()
endif()
set(HEADROOM_HAS_NCCL ON)
add_library(headroom_find_nccl INTERFACE)
target_include_directories(headroom_find_nccl SYSTEM INTERFACE ${NCCL_INCLUDE_DIR})
target_link_libraries(headroom_find_nccl INTERFACE ${NCCL_LIBRARY})
