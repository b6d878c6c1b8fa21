#include <gtest/gtest.h>

#include "tests/files/support.h"

namespace headroom::files {
namespace {

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape +
         "],\"data_offsets\":[" + offsets + "]}";
}

TEST(Safetensors, ReadsEveryFloatTypeAndOmitsTheRest) {
  const std::vector<float> f = {1.0f, -2.0f};
  const std::vector<double> d = {3.0};
  const std::vector<f16> h = {f16(0.5f)};
  const std::vector<bf16> b = {bf16(7.0f)};
  const std::string header =
      "{\"__metadata__\":{\"format\":\"pt\"}," + entry("d", "F64", "", "8,16") + "," +
      entry("f", "F32", "2,1", "0,8") + "," + entry("h", "F16", "1", "16,18") + "," +
      entry("b", "BF16", "1", "18,20") + "," + entry("step", "I64", "1", "20,28") + "," +
      entry("empty", "F32", "0,7", "28,28") + "}   ";
  const TemporaryFile made(safetensors(
      header, to_bytes(f) + to_bytes(d) + to_bytes(h) + to_bytes(b) + std::string(8, '\1')));
  const TensorFile file(made.path());
  ASSERT_EQ(file.tensors().size(), 5u);
  EXPECT_EQ(file.tensors()[0].name, "f");
  EXPECT_EQ(file.tensors()[0].shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(read_all_elements(file, file.tensors()[0]), to_bytes(f));
  EXPECT_EQ(file.tensors()[1].count, 1);  // no dimensions: a scalar
  EXPECT_EQ(read_all_elements(file, file.tensors()[1]), to_bytes(d));
  EXPECT_EQ(read_all_elements(file, file.tensors()[2]), to_bytes(h));
  EXPECT_EQ(file.tensors()[3].dtype, DType::kBF16);
  EXPECT_EQ(read_all_elements(file, file.tensors()[3]), to_bytes(b));
  EXPECT_EQ(read_all_elements(file, file.tensors()[4]), "");
  ASSERT_EQ(file.left_out().size(), 1u);
  EXPECT_EQ(file.left_out()[0].dtype, "I64");
}

TEST(Safetensors, ReadsAnyRangeOfATensor) {
  std::vector<float> values(300000);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const TemporaryFile made(
      safetensors("{" + entry("w", "F32", "300000", "0,1200000") + "}", to_bytes(values)));
  const TensorFile file(made.path());
  for (const auto& [first, count] : {std::pair{0, 300000}, {1, 5}, {299999, 1}, {7, 200000}}) {
    std::vector<float> seen;
    file.read(file.tensors()[0], first, count, [&](const void* data, int64_t now) {
      const auto* p = static_cast<const float*>(data);
      seen.insert(seen.end(), p, p + now);
    });
    ASSERT_EQ(seen.size(), static_cast<size_t>(count));
    EXPECT_EQ(seen.front(), static_cast<float>(first));
    EXPECT_EQ(seen.back(), static_cast<float>(first + count - 1));
  }
}

TEST(Safetensors, U16TensorsCanBeReadAsBf16) {
  const std::string content =
      safetensors("{" + entry("w", "U16", "2", "0,4") + "}", to_bytes(std::vector<uint16_t>{1, 2}));
  expect_refused(content, "--as bf16");
  const TemporaryFile made(content);
  EXPECT_EQ(TensorFile(made.path(), {true}).tensors()[0].dtype, DType::kBF16);
}

TEST(Safetensors, EightBitTypesAreOmittedAndListed) {
  for (const char* type : {"F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"}) {
    const TemporaryFile made(
        safetensors("{" + entry("a", type, "4", "0,4") + "," + entry("b", "F32", "1", "4,8") + "}",
                    std::string(8, '\0')));
    const TensorFile file(made.path());
    ASSERT_EQ(file.left_out().size(), 1u) << type;
    EXPECT_EQ(file.left_out()[0].dtype, type);
  }
}

TEST(Safetensors, InvalidHeadersAreRefused) {
  expect_refused("", "too short");
  expect_refused("1234567", "too short");
  expect_refused(little_endian(3, 8) + "{}", "more than the file has");
  expect_refused(little_endian(~uint64_t{0}, 8) + "{}", "more than the file has");
  expect_refused(safetensors("", ""), "not JSON");
  expect_refused(safetensors("{", ""), "not JSON");
  expect_refused(safetensors("{}x", ""), "not JSON");
  expect_refused(safetensors("\xff\xfe{}", ""), "not JSON");
  expect_refused(safetensors("[]", ""), "does not belong");
  expect_refused(safetensors("7", ""), "does not belong");
  expect_refused(safetensors("{\"a\":7}", ""), "does not belong");
  expect_refused(safetensors("{\"a\":null}", ""), "null");
  expect_refused(safetensors("{\"a\":true}", ""), "a boolean");
  expect_refused(safetensors("{\"a\":{}}", ""), "no dtype");
  expect_refused(safetensors("{\"__metadata__\":{\"a\":1}}", ""), "does not belong");
  expect_refused(safetensors("{\"__metadata__\":{},\"__metadata__\":{}}", ""), "twice");
  expect_refused(safetensors("{\"a\":{\"dtype\":\"F32\"}}", ""), "no shape");
  expect_refused(safetensors("{\"a\":{\"dtype\":\"F32\",\"shape\":[]}}", ""), "data_offsets");
  expect_refused(safetensors(std::string(100000, '['), ""), "does not belong");
}

TEST(Safetensors, InconsistentTensorsAreRefused) {
  const std::string four(4, '\0');
  const auto file = [&](const std::string& header) {
    return safetensors("{" + header + "}", four);
  };
  expect_refused(file(entry("a", "F99", "1", "0,4")), "unknown dtype 'F99'");
  expect_refused(file(entry("a", "F32", "2", "0,4")), "take 8");
  expect_refused(file(entry("a", "F32", "-1", "0,4")), "a negative number");
  expect_refused(file(entry("a", "F32", "1.5", "0,4")), "a fraction");
  expect_refused(file(entry("a", "F32", "1", "-4,0")), "a negative number");
  expect_refused(file(entry("a", "F32", "1", "4,0")), "but its shape and dtype take 4");
  expect_refused(file(entry("a", "F32", "1", "0,4,4")), "does not belong");
  expect_refused(file(entry("a", "F32", "1", "0")), "two numbers");
  expect_refused(file(entry("a", "F32", "1", "0,18446744073709551616")), "beyond 2^64");
  expect_refused(file(entry("a", "F32", "1152921504606846976", "0,4")), "more elements");
  expect_refused(file(entry("a", "F32", "4294967296,4294967296", "0,4")), "more elements");
  expect_refused(file(entry("a", "F32", "9223372036854775808", "0,4")), "beyond 2^63");
  expect_refused(file(entry("a", "F32", "2", "0,8")), "truncated");
  expect_refused(file(entry("a", "F32", "1", "18446744073709551612,18446744073709551615")),
                 "take 4");
  expect_refused(file(entry("a", "F16", "1", "0,2")), "2 bytes after its last tensor");
  expect_refused(file(entry("a", "F16", "1", "2,4")), "a gap before 'a'");
  expect_refused(file(entry("a", "F16", "2", "0,4") + "," + entry("b", "F16", "1", "2,4")),
                 "an overlap before 'b'");
  expect_refused(file(entry("a", "F32", "1", "0,4") + "," + entry("a", "F32", "1", "0,4")),
                 "'a' twice");
  std::string many = "1";
  for (int i = 0; i < 64; ++i) many += ",1";
  expect_refused(file(entry("a", "F32", many, "0,4")), "more than 64 dimensions");
  expect_refused(file(entry(std::string(70000, 'a'), "F32", "1", "0,4")), "more than 65535 bytes");
  expect_refused(file("\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}"), "second 'dtype'");
}

// A short entry takes several times its length in memory, so the number of entries is limited.
TEST(Safetensors, TooManyHeaderEntriesAreRefused) {
  const auto header = [](size_t entries, const auto& entry_of) {
    std::string text = "{";
    for (size_t i = 0; i < entries; ++i) text += (i > 0 ? "," : "") + entry_of(std::to_string(i));
    return text + "}";
  };
  const auto tensor = [](const std::string& name) { return entry(name, "F32", "0", "0,0"); };
  const auto note = [](const std::string& name) { return "\"" + name + "\":\"\""; };
  const TemporaryFile made(safetensors(header(kMostEntries, tensor), ""));
  EXPECT_EQ(TensorFile(made.path()).tensors().size(), kMostEntries);
  const std::string part = "more than 262144 entries";
  expect_refused(safetensors(header(kMostEntries + 1, tensor), ""), part);
  expect_refused(safetensors("{\"__metadata__\":" + header(kMostEntries, note) + "}", ""), part);
}

TEST(Safetensors, NamesInErrorsAreSanitized) {
  expect_refused(
      safetensors("{" + entry("\\u001b[2J" + std::string(500, 'x'), "F99", "", "0,4") + "}",
                  std::string(4, '\0')),
      "'?[2Jxxx");
}

TEST(TensorFile, NonRegularFilesAreRefused) {
  expect_error(ErrorCode::kFile, "No such file", [] { TensorFile("/no/such/file"); });
  expect_error(ErrorCode::kFile, "it is a folder", [] { TensorFile("/tmp"); });
  expect_error(ErrorCode::kFile, "not a regular file", [] { TensorFile("/dev/null"); });
}

TEST(TensorFile, FileTruncatedDuringReadingIsAnError) {
  const std::string header = "{" + entry("w", "F32", "250000", "0,1000000") + "}";
  const TemporaryFile made(safetensors(header, std::string(1000000, '\0')));
  const TensorFile file(made.path());
  std::filesystem::resize_file(made.path(), 500000);
  expect_error(ErrorCode::kBadState, "truncated while it was being read",
               [&] { read_all_elements(file, file.tensors()[0]); });
}

}  // namespace
}  // namespace headroom::files
