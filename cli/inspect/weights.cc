#include <headroom/weights.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "cli/inspect/inspection.h"
#include "cli/inspect/reading_bar.h"
#include "cli/output.h"

namespace headroom::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kUnsafe = 3;

void add_counts(const WeightTensor& tensor, Json* json) {
  (*json)["count"] = tensor.count;
  (*json)["zeros"] = tensor.zeros;
  (*json)["inf"] = tensor.infs;
  (*json)["nan"] = tensor.nans;
  (*json)["largest"] = tensor.largest;
  (*json)["smallest"] = tensor.smallest;
  (*json)["flushed"] = tensor.fp16.flushed;
  (*json)["subnormal"] = tensor.fp16.subnormal;
  (*json)["overflow"] = tensor.fp16.overflow;
  (*json)["flushed_share"] = share(tensor.fp16.flushed, tensor.nonzero());
}

// Tensor by tensor, so that the JSON of all of them is never in memory at once.
void print_json(const WeightReport& report) {
  Json total;
  add_counts(report.total, &total);
  print(
      "{{\"safe\":{},\"complete\":{},\"verdict\":{},\"lose\":{},\"keep_fp32\":{},\"total\":{},"
      "\"tensors\":[",
      report.safe, report.complete, json_text(report.verdict), json_text(report.lose),
      json_text(report.keep_fp32), json_text(total));
  for (size_t i = 0; i < report.tensors.size(); ++i) {
    const WeightTensor& tensor = report.tensors[i];
    Json json = {{"file", tensor.file},
                 {"name", tensor.name},
                 {"dtype", to_string(tensor.dtype)},
                 {"shape", tensor.shape}};
    add_counts(tensor, &json);
    print("{}{}", i == 0 ? "\n" : ",\n", json_text(json));
  }
  Json left_out = Json::array();
  for (const LeftOutWeights& left : report.left_out) {
    left_out.push_back(
        {{"file", left.file}, {"name", left.name}, {"dtype", left.dtype}, {"count", left.count}});
  }
  print("],\n\"left_out\":{}}}\n", json_text(left_out));
}

}  // namespace

int inspect_weights(const InspectOptions& options) {
  WeightInspector inspector(options.lose);
  {
    ReadingBar bar;
    inspector.add_files(options.files,
                        [&](uint64_t done, uint64_t total) { bar.show(done, total); });
  }
  const WeightReport report = inspector.finish();
  options.json ? print_json(report)
               : print_text(report.to_string(terminal_width(STDOUT_FILENO), options.all));
  return report.safe ? 0 : kUnsafe;
}

}  // namespace headroom::cli
