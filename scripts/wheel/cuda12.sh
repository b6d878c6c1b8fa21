# Sourced by scripts/wheels: a CUDA 12 compiler in a folder, next to whatever is installed. nvcc 12.4 is in Debian 13's
# non-free section; headers and the static runtime are on PyPI.

# cuda12_toolkit FOLDER PIP
cuda12_toolkit() {
  local folder=$1 pip=$2 root wheels usr
  [ -e "$folder/complete" ] && return
  root=$folder.debian wheels=$folder.wheels
  debian_files "$root" amd64 trixie "main contrib non-free" nvidia-cuda-toolkit
  rm -rf "$folder" "$wheels"
  mkdir -p "$folder"/{bin/crt,include,lib64,nvvm/bin,nvvm/libdevice} "$wheels/headers" "$wheels/runtime"
  "$pip" download -q --no-deps -d "$wheels/headers" nvidia-cuda-runtime-cu12==12.4.127 nvidia-cuda-nvcc-cu12==12.4.131
  "$pip" download -q --no-deps -d "$wheels/runtime" nvidia-cuda-runtime-cu12==12.9.79  # 12.4 has no static library
  local wheel
  for wheel in "$wheels"/*/*.whl; do python3 -m zipfile -e "$wheel" "$(dirname "$wheel")"; done
  usr=$root/usr/lib/nvidia-cuda-toolkit
  cp "$root"/usr/bin/{bin2c,cudafe++,cuobjdump,fatbinary,nvlink,ptxas} "$usr/bin/nvcc" "$folder/bin"
  cp "$usr"/bin/crt/* "$folder/bin/crt"
  cp "$usr/bin/cicc" "$folder/nvvm/bin"
  cp "$usr/libdevice/libdevice.10.bc" "$folder/nvvm/libdevice"
  cp -r "$wheels"/headers/nvidia/*/include/* "$folder/include"
  cp "$wheels/runtime/nvidia/cuda_runtime/lib/libcudart_static.a" "$folder/lib64"
  ar rcs "$folder/lib64/libcudadevrt.a"  # empty: nothing here launches kernels from kernels
  cat >"$folder/bin/nvcc.profile" <<'EOF'
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
EOF
  touch "$folder/complete"
}
