// The style sheet and the scripts of the report.
#ifndef HEADROOM_SRC_RECORD_ASSETS_H_
#define HEADROOM_SRC_RECORD_ASSETS_H_

namespace headroom::internal {

/// The files of report/, which CMake embeds in the library (see assets.cc.in). The scripts are
/// concatenated in this order.
extern const char* const kReportStyle;
extern const char* const kReportScripts[9];

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_RECORD_ASSETS_H_
