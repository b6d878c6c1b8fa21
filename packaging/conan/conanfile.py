"""Conan 2 recipe: conan create packaging/conan [-o "headroom/*:system_deps=True"]"""

import pathlib
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("adapters/c", "cmake", "include", "src")


class Headroom(ConanFile):
    name = "headroom"
    license = "Apache-2.0"
    author = "The Headroom authors"
    description = "Loss scaling for mixed-precision training in C++"
    topics = ("mixed-precision", "loss-scaling", "fp16", "deep-learning")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False], "cuda": [True, False], "system_deps": [True, False]}  # noqa: RUF012
    # system_deps: Highway and the headers are those installed on the system.
    default_options = {"shared": True, "cuda": False, "system_deps": False}  # noqa: RUF012

    def set_version(self):
        header = (pathlib.Path(self.recipe_folder) / "../../include/headroom/version.h").read_text()
        self.version = re.search(r'HEADROOM_VERSION "([\d.]+)"', header)[1]

    def export_sources(self):
        for folder in FOLDERS:
            copy(self, "*", str(ROOT / folder), str(pathlib.Path(self.export_sources_folder) / folder))
        for file in ("CMakeLists.txt", "LICENSE", "README.md"):
            copy(self, file, str(ROOT), self.export_sources_folder)

    def requirements(self):
        if not self.options.system_deps:
            self.requires("highway/1.2.0")
            self.requires("nlohmann_json/3.11.3")
            self.requires("dlpack/1.0")
            self.requires("xxhash/0.8.2")

    def validate(self):
        check_min_cppstd(self, 17)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.variables["BUILD_SHARED_LIBS"] = bool(self.options.shared)
        toolchain.variables["HEADROOM_CUDA"] = "ON" if self.options.cuda else "OFF"
        toolchain.variables["HEADROOM_BUILD_CLI"] = False
        toolchain.variables["HEADROOM_BUILD_TESTS"] = False
        for name in ("LIBTORCH", "MPI", "NCCL", "PYTHON", "WERROR"):
            toolchain.variables[f"HEADROOM_{name}"] = "OFF"
        toolchain.generate()
        CMakeDeps(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()

    def package_info(self):
        # The package's own files of find_package(headroom) are used.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["lib/cmake/headroom"]
        self.cpp_info.libs = ["headroom-tools", "headroom", "headroom-c"]
