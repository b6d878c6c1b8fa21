# Sets HEADROOM_HAS_PYTHON and finds the interpreter whose headers are used.
set(HEADROOM_HAS_PYTHON OFF)
if(HEADROOM_PYTHON STREQUAL "OFF" OR HEADROOM_SANITIZE)  # a plain interpreter cannot load a sanitized module
  return()
endif()
# Prefers Debian's Python, for which its packages of NumPy and pytest are made, to others in PATH.
if(NOT SKBUILD AND NOT DEFINED Python_EXECUTABLE AND EXISTS /usr/bin/python3)
  set(Python_EXECUTABLE /usr/bin/python3)
endif()
if(HEADROOM_PYTHON STREQUAL "AUTO")
  find_package(Python 3.10 QUIET COMPONENTS Interpreter Development.Module)
else()
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
endif()
if(Python_FOUND)
  set(HEADROOM_HAS_PYTHON ON)
endif()
