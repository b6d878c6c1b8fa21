# Flags for everything we compile. -ffp-contract=off is part of what the library promises: no
# compiler may fuse a multiply and an add, so every SIMD target gives the same bits.
add_library(headroom_flags INTERFACE)
target_compile_features(headroom_flags INTERFACE cxx_std_20)
target_compile_options(headroom_flags INTERFACE
  -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -ffp-contract=off)
if(HEADROOM_SANITIZE)
  target_compile_options(headroom_flags INTERFACE
    -fsanitize=${HEADROOM_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g)
  target_link_options(headroom_flags INTERFACE -fsanitize=${HEADROOM_SANITIZE})
endif()
