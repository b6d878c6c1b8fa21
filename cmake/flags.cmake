# Flags of all our targets. -ffp-contract=off (--fmad=false) and -fno-fast-math are part of the
# library's promises: without fused multiply-adds every SIMD target gives the same bits, and inf and NaN
# are honoured even inside a project that is built with -ffast-math.
add_library(headroom_flags INTERFACE)
target_compile_features(headroom_flags INTERFACE cxx_std_20)
set(_warnings -Wall -Wextra)
if(HEADROOM_WERROR)
  list(APPEND _warnings -Werror)
endif()
list(JOIN _warnings "," _host_warnings)
target_compile_options(headroom_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:C,CXX>:${_warnings}>"
  "$<$<COMPILE_LANGUAGE:CXX>:-Wshadow;-Wconversion;-Wno-sign-conversion>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${_host_warnings}>"
  "$<$<AND:$<BOOL:${HEADROOM_WERROR}>,$<COMPILE_LANGUAGE:CUDA>>:--Werror=all-warnings>"
  "$<$<COMPILE_LANGUAGE:CXX>:-fno-fast-math;-ffp-contract=off>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;--fmad=false;--expt-relaxed-constexpr>")
# Hardening of optimised builds: stack protectors and fortified C library calls end the program on an
# overrun, and full RELRO makes function addresses read-only after the start.
set(_optimised "$<CONFIG:Release,RelWithDebInfo,MinSizeRel>")
target_compile_options(headroom_flags INTERFACE
  "$<$<AND:${_optimised},$<COMPILE_LANGUAGE:C,CXX>>:-fstack-protector-strong;-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=2>"
  "$<$<AND:${_optimised},$<COMPILE_LANGUAGE:CUDA>>:-Xcompiler=-fstack-protector-strong>")
target_link_options(headroom_flags INTERFACE "$<${_optimised}:LINKER:-z,relro,-z,now>")
if(HEADROOM_SANITIZE)
  target_compile_options(headroom_flags INTERFACE
    -fsanitize=${HEADROOM_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(headroom_flags INTERFACE -fsanitize=${HEADROOM_SANITIZE})
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(headroom_flags INTERFACE  # false positives on std::string +
    $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()

# With HEADROOM_UNITY, compiles the files of a target together. For targets that spend most of their
# compile time on headers (LibTorch, JSON).
function(headroom_read_headers_once target)
  if(HEADROOM_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 10)
  endif()
endfunction()

# For code that does not limit the speed of anything, such as parsing options: with -O3 it takes half as long again to compile.
function(headroom_compile_fast target)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
endfunction()

# An installed program or library. The build tree already uses the RUNPATH of the installation:
# otherwise CMake appends an empty element, to be edited at installation, and the dynamic linker takes
# an empty element for the current folder. $ORIGIN lets libraries find each other in their own folder;
# the folders of LibTorch, MPI and NCCL are added where the linker does not search them by default.
function(headroom_installed_target target)
  set_target_properties(${target} PROPERTIES
    BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH $ORIGIN INSTALL_RPATH_USE_LINK_PATH ON
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
endfunction()

# An installed library: headroom::NAME in libheadroom-NAME, or without NAME the library `headroom`.
function(headroom_installed_library target)
  set_target_properties(${target} PROPERTIES
    VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
    LINKER_LANGUAGE CXX)
  if(ARGC GREATER 1)
    set_target_properties(${target} PROPERTIES EXPORT_NAME ${ARGV1} OUTPUT_NAME headroom-${ARGV1})
  endif()
  headroom_installed_target(${target})
  if(NOT HEADROOM_SANITIZE)  # sanitizers leave their own symbols undefined
    target_link_options(${target} PRIVATE LINKER:-z,defs)  # undefined symbols are errors
  endif()
endfunction()

# Exports only symbols marked HEADROOM_API.
function(headroom_hide_symbols target)
  set_target_properties(${target} PROPERTIES
    POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
endfunction()
