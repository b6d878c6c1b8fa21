# Flags for everything we compile. The last two are part of what the library promises: no fused
# multiply-add, so that every SIMD target gives the same bits, and inf and NaN are real, even inside a
# project that is built with -ffast-math.
add_library(headroom_flags INTERFACE)
target_compile_features(headroom_flags INTERFACE cxx_std_20)
target_compile_options(headroom_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wconversion;-Wno-sign-conversion>"
  "$<$<COMPILE_LANGUAGE:CXX>:-fno-fast-math;-ffp-contract=off>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;--fmad=false;--expt-relaxed-constexpr>")
if(HEADROOM_SANITIZE)
  target_compile_options(headroom_flags INTERFACE
    -fsanitize=${HEADROOM_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(headroom_flags INTERFACE -fsanitize=${HEADROOM_SANITIZE})
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(headroom_flags INTERFACE  # wrong alarms on std::string +
    $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()

# Where reading headers (LibTorch, JSON, pybind11) takes longer than all else, it is done once for
# several files of a target.
function(headroom_read_headers_once target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 10)
endfunction()
