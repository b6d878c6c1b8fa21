# Sets HEADROOM_HAS_PYTHON and finds pybind11 and the interpreter to build for.
set(HEADROOM_HAS_PYTHON OFF)
if(HEADROOM_PYTHON STREQUAL "OFF" OR HEADROOM_SANITIZE)  # a plain interpreter cannot load a sanitized module
  return()
endif()
# Prefers Debian's Python, for which its packages of pybind11, NumPy and pytest are made, to others in PATH.
if(NOT SKBUILD AND NOT DEFINED Python_EXECUTABLE AND EXISTS /usr/bin/python3)
  set(Python_EXECUTABLE /usr/bin/python3)
endif()
if(HEADROOM_PYTHON STREQUAL "AUTO")
  find_package(Python 3.11 QUIET COMPONENTS Interpreter Development.Module)
  find_package(pybind11 2.10 CONFIG QUIET)
else()
  find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
  find_package(pybind11 2.10 CONFIG REQUIRED)
endif()
if(Python_FOUND AND pybind11_FOUND)
  set(HEADROOM_HAS_PYTHON ON)
endif()
