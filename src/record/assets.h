#ifndef HEADROOM_SRC_RECORD_ASSETS_H_
#define HEADROOM_SRC_RECORD_ASSETS_H_

namespace headroom::internal {

/// The files of report/, put into the library by CMake. The scripts are one, in this order.
extern const char* const kReportStyle;
extern const char* const kReportScripts[4];

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_RECORD_ASSETS_H_
