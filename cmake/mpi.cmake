# Finds MPI. Sets HEADROOM_HAS_MPI.
set(HEADROOM_HAS_MPI OFF)
if(HEADROOM_MPI STREQUAL "OFF")
  return()
endif()
set(MPI_CXX_SKIP_MPICXX ON)  # the deprecated C++ interface of MPI is not used
if(HEADROOM_MPI STREQUAL "AUTO")
  find_package(MPI QUIET COMPONENTS CXX)
else()
  find_package(MPI REQUIRED COMPONENTS CXX)
endif()
if(MPI_CXX_FOUND)
  set(HEADROOM_HAS_MPI ON)
endif()
