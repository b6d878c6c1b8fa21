// .npy and .npz
#include <gtest/gtest.h>

#include "tests/files/support.h"

namespace headroom::files {
namespace {

const std::string kFour = to_bytes(std::vector<float>{1.0f, -2.0f, 3.0f, 4.0f});

TEST(Npy, ReadsEveryFloatTypeInBothByteOrders) {
  const auto read = [](const std::string& content) {
    const TemporaryFile made(content);
    const TensorFile file(made.path());
    return read_all_elements(file, file.tensors().at(0));
  };
  EXPECT_EQ(read(npy("'<f4'", "(2, 2)", kFour)), kFour);
  EXPECT_EQ(read(npy("'<f4'", "(4,)", kFour, "True")), kFour);
  EXPECT_EQ(read(npy("'<f8'", "()", to_bytes(std::vector<double>{7.5}))),
            to_bytes(std::vector<double>{7.5}));
  EXPECT_EQ(read(npy("'<f2'", "(2,)", "\x01\x02\x03\x04")), "\x01\x02\x03\x04");
  EXPECT_EQ(read(npy("'>f2'", "(2,)", "\x01\x02\x03\x04")), "\x02\x01\x04\x03");
  EXPECT_EQ(read(npy("'>f8'", "(1,)", "12345678")), "87654321");
  EXPECT_EQ(read(npy("'bfloat16'", "(2,)", "1234")), "1234");
  EXPECT_EQ(read(npy("'<f4'", "(0, 5)", "")), "");
}

TEST(Npy, VoidAndIntegerArraysCanBeReadAsBf16) {
  for (const std::string descr : {"'<V2'", "'|V2'", "'<u2'", "'<i2'"}) {
    const std::string content = npy(descr, "(2,)", "1234");
    expect_refused(content, "add --as bf16");
    const TemporaryFile made(content);
    const TensorFile file(made.path(), {true});
    EXPECT_EQ(file.tensors().at(0).dtype, DType::kBF16);
    EXPECT_EQ(read_all_elements(file, file.tensors()[0]), "1234");
  }
}

TEST(Npy, ReadsFormatVersionsTwoAndThree) {
  const std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n";
  for (const char version : {'\2', '\3'}) {
    const std::string content = std::string("\x93NUMPY") + version + std::string(1, '\0') +
                                little_endian(header.size(), 4) + header + "1234";
    const TemporaryFile made(content);
    const TensorFile file(made.path());
    EXPECT_EQ(read_all_elements(file, file.tensors().at(0)), "1234");
  }
}

TEST(Npy, InconsistentHeadersAreRefused) {
  expect_refused("\x93NUMPY", "truncated in its header");
  expect_refused(std::string("\x93NUMPY\x09\x00", 8) + "xxxxxxxx", "version 9.0");
  expect_refused(std::string("\x93NUMPY\x01\x00\xff\xff", 10) + "{}", "truncated in its header");
  expect_refused(std::string("\x93NUMPY\x02\x00\xff\xff\xff\xff", 12) + "{}",
                 "claims a header of 4294967295 bytes");
  expect_refused(npy("'<f4'", "(5,)", kFour), "truncated: it should hold 5 elements");
  expect_refused(npy("'<f4'", "(3,)", kFour), "4 bytes after its array");
  expect_refused(npy("'<f4'", "(-1,)", kFour), "negative");
  expect_refused(npy("'<f4'", "(1152921504606846976,)", kFour), "larger than any file");
  expect_refused(npy("'<f4'", "(4294967296, 4294967296)", kFour), "larger than any file");
  expect_refused(npy("'<f4'", "(99999999999999999999,)", kFour), "not NumPy's");
  expect_refused(npy("'<f4'", "(4.0,)", kFour), "not NumPy's");
  expect_refused(npy("'<f4'", "[4]", kFour), "not NumPy's");
  expect_refused(npy("'<f4'", "(4,), 'shape': (4,)", kFour), "not NumPy's");
  expect_refused(npy("[('a', '<f4')]", "(4,)", kFour), "structured");
  expect_refused(npy("'<q9'", "(4,)", kFour), "unknown dtype '<q9'");
  expect_refused(npy("'<i4'", "(4,)", kFour), "is of type '<i4'");
  expect_refused(npy("'|O'", "(4,)", kFour), "is of type '|O'");
  expect_refused(npy("'<f4'", "(4,)", kFour, "Maybe"), "not NumPy's");
}

std::vector<Member> make_members(bool deflate, bool zip64) {
  return {{"a.npy", npy("'<f4'", "(4,)", kFour), deflate, zip64},
          {"mask.npy", npy("'|b1'", "(4,)", "1111"), deflate, zip64},
          {"b.npy", npy("'<f2'", "(200000,)", std::string(400000, 'x')), deflate, zip64},
          {"none.npy", npy("'<f8'", "(0,)", ""), deflate, zip64}};
}

TEST(Npz, ReadsStoredAndDeflatedMembersWithAndWithoutZip64) {
  for (const bool deflate : {false, true}) {
    for (const bool zip64 : {false, true}) {
      const TemporaryFile made(zip(make_members(deflate, zip64)));
      const TensorFile file(made.path());
      ASSERT_EQ(file.tensors().size(), 3u);
      EXPECT_EQ(file.tensors()[0].name, "a");
      EXPECT_EQ(read_all_elements(file, file.tensors()[0]), kFour);
      EXPECT_EQ(read_all_elements(file, file.tensors()[1]), std::string(400000, 'x'));
      EXPECT_EQ(read_all_elements(file, file.tensors()[2]), "");
      ASSERT_EQ(file.left_out().size(), 1u);
      EXPECT_EQ(file.left_out()[0].name, "mask");
    }
  }
}

TEST(Npz, StructuredMemberIsOmitted) {
  const std::string fields = npy("[('a', '<f4')]", "(4,)", kFour);
  const TemporaryFile made(zip({{"a.npy", npy("'<f4'", "(4,)", kFour)}, {"b.npy", fields}}));
  const TensorFile file(made.path());
  EXPECT_EQ(file.tensors().size(), 1u);
  ASSERT_EQ(file.left_out().size(), 1u);
  EXPECT_EQ(file.left_out()[0].name, "b");
  EXPECT_EQ(file.left_out()[0].dtype, "structured");
  expect_refused(zip({{"b.npy", fields}}), "structured array; save its fields");
}

TEST(Npz, ElementsAcrossChunkBoundariesAreComplete) {
  std::vector<double> values(100003);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i) * 0.1;
  const std::string content = npy("'<f8'", "(100003,)", to_bytes(values));
  const TemporaryFile made(zip({{"w.npy", content, true}}));
  const TensorFile file(made.path());
  EXPECT_TRUE(file.tensors()[0].packed);
  EXPECT_EQ(read_all_elements(file, file.tensors()[0]), to_bytes(values));
}

TEST(Npz, ArchivesNotMadeByNumPyAreRefused) {
  const std::string good = npy("'<f4'", "(4,)", kFour);
  expect_refused(zip({{"a.npy", good, false, false, 1}}), "encrypted");
  expect_refused(zip({{"a.npy", good, false, false, 0, 12}}), "method 12");
  expect_refused(zip({{"a.npy", good}, {"a.npy", good}}), "'a' twice");
  expect_refused(zip({{"data.pkl", "x"}}), "without .npy members");
  expect_refused(zip({}), "without .npy members");
  expect_refused(zip({{"a.npy", "nothing"}}), "is not an .npy file");
}

TEST(Npz, InconsistentMembersAreRefused) {
  const std::string good = npy("'<f4'", "(4,)", kFour);
  expect_refused(zip({{"a.npy", good, false, false, 0, 0, 4}}), "its two sizes differ");
  const std::string five = npy("'<f4'", "(5,)", kFour), three = npy("'<f4'", "(3,)", kFour);
  expect_refused(zip({{"a.npy", five, true, false, 0, 0, 4}}), "shorter than it claims");
  expect_refused(zip({{"a.npy", three, true, false, 0, 0, -4}}), "longer than it claims");
  expect_refused(zip({{"a.npy", good, true, false, 0, 0, 0, true}}), "wrong checksum");
  const std::string longer = npy("'<f4'", "(1000000,)", kFour);
  expect_refused(zip({{"a.npy", longer, true}}), "truncated");
}

TEST(Npz, InconsistentTablesOfContentsAreRefused) {
  const std::string whole = zip({{"a.npy", npy("'<f4'", "(4,)", kFour)}});
  const size_t end = whole.size() - 22, entry = whole.rfind("PK\x01\x02");
  const auto patch = [&](size_t at, uint64_t value, size_t bytes) {
    return std::string(whole).replace(at, bytes, little_endian(value, bytes));
  };
  expect_refused(patch(end + 16, 0x7FFFFFFF, 4), "table of contents lies outside the file");
  expect_refused(patch(end + 10, 2, 2), "table of contents ends early");
  expect_refused(patch(entry + 28, 0x7FFF, 2), "table of contents ends early");
  expect_refused(patch(entry + 42, 0x7FFFFFFF, 4), "'a.npy' lies outside the file");
  expect_refused(patch(entry + 42, 1, 4), "'a.npy' is not where it should be");
  expect_refused(patch(26, 0x7FFF, 2), "'a.npy' lies outside the file");  // the name's length
}

TEST(Npz, EveryTruncationIsRefused) {
  for (const bool zip64 : {false, true}) {
    const std::string whole = zip({{"a.npy", npy("'<f4'", "(4,)", kFour), true, zip64}});
    for (size_t bytes = 4; bytes < whole.size(); ++bytes) {
      const TemporaryFile made(whole.substr(0, bytes));
      EXPECT_THROW(TensorFile(made.path()), Error) << bytes;
    }
  }
}

TEST(Npz, OverlappingMembersAreRefused) {
  // Two entries of the table refer to the same member.
  std::string whole =
      zip({{"a.npy", npy("'<f4'", "(4,)", kFour)}, {"b.npy", npy("'<f4'", "(4,)", kFour)}});
  const size_t second = whole.rfind("PK\x01\x02");
  const std::string zero(4, '\0');
  whole.replace(second + 42, 4, zero);
  expect_refused(whole, "overlap");
}

// Replaces the end record by that of archives with more than 65535 members or 4 GB.
std::string add_zip64_end(const std::string& whole, uint64_t disk = 0, uint64_t lie = 0) {
  const std::string before = whole.substr(0, whole.size() - 22);
  const std::string end = whole.substr(whole.size() - 22);
  const auto number = [&](size_t at, size_t bytes) {
    uint64_t value = 0;
    std::memcpy(&value, end.data() + at, bytes);
    return little_endian(value, 8);
  };
  const std::string end64 = little_endian(0x06064B50, 4) + little_endian(44, 8) +
                            little_endian(45, 2) + little_endian(45, 2) + little_endian(disk, 4) +
                            little_endian(0, 4) + number(10, 2) + number(10, 2) + number(12, 4) +
                            number(16, 4);
  const std::string locator = little_endian(0x07064B50, 4) + little_endian(0, 4) +
                              little_endian(before.size() + lie, 8) + little_endian(1, 4);
  return before + end64 + locator + end.substr(0, 8) + std::string(12, '\xff') + end.substr(20);
}

TEST(Npz, ReadsArchivesWithAZip64End) {
  const std::string plain = zip(make_members(true, true));
  const TemporaryFile made(add_zip64_end(plain));
  const TensorFile file(made.path());
  EXPECT_EQ(file.tensors().size(), TensorFile(TemporaryFile(plain).path()).tensors().size());
  expect_refused(add_zip64_end(plain, 1), "split zip archive");
  expect_refused(add_zip64_end(plain, 0, 1), "not where it should be");
  expect_refused(add_zip64_end(plain, 0, 1 << 20), "outside the file");
  std::string many = add_zip64_end(plain);
  many.replace(many.rfind("PK\x06\x06") + 32, 8, little_endian(kMostEntries + 1, 8));
  expect_refused(many, "has 262145 members; 262144 are accepted");
}

// 64 MB of zeros in 64 KB are read in chunks, so memory does not grow with them.
TEST(Npz, DecompressionBombIsReadInBoundedMemory) {
  const TemporaryFile made(
      zip({{"a.npy", npy("'<f4'", "(16777216,)", std::string(size_t{1} << 26, '\0')), true}}));
  const TensorFile file(made.path());
  int64_t count = 0;
  file.read(file.tensors()[0], 0, file.tensors()[0].count, [&](const void*, int64_t now) {
    EXPECT_LE(now, 65536);
    count += now;
  });
  EXPECT_EQ(count, 16777216);
}

}  // namespace
}  // namespace headroom::files
