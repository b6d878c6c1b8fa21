// The version of Headroom. CMake and the Python package read it from here.
#ifndef HEADROOM_VERSION_H_
#define HEADROOM_VERSION_H_

#define HEADROOM_VERSION_MAJOR 0
#define HEADROOM_VERSION_MINOR 2
#define HEADROOM_VERSION_PATCH 0
#define HEADROOM_VERSION "0.2.0"

#endif  // HEADROOM_VERSION_H_
