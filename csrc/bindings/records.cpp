#include "bindings/bind.hpp"
#include "cpu/records/gather.hpp"

#include <cstdint>
#include <stdexcept>
#include <utility>

namespace topkube {

namespace {

using Longs = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Files = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Checks that every record fits before anything is copied.
void check(const Longs& offsets, const Longs& lengths, const Bytes& out, int64_t source_bytes) {
  require(offsets.size() == lengths.size(), "offsets and lengths differ in length");
  uint64_t total = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int64_t offset = offsets.data()[i], length = lengths.data()[i];
    if (offset < 0 || length < 0 || (source_bytes >= 0 && (offset > source_bytes || length > source_bytes - offset)))
      throw std::out_of_range("a record lies outside the source");
    total += static_cast<uint64_t>(length);
  }
  require(total == out.size(), "the size of out is not the total size of the records");
}

}  // namespace

void bind_records(nb::module_& m) {
  m.def("gather_memory", [](ConstBytes source, Longs offsets, Longs lengths, Bytes out) {
    check(offsets, lengths, out, static_cast<int64_t>(source.size()));
    nb::gil_scoped_release free;
    gather_memory(source.data(), offsets.data(), lengths.data(), offsets.size(), out.data());
  });
  m.def("gather_rows", [](ConstBytes source, size_t length, Longs rows, Bytes out) {
    require(out.size() == rows.size() * length, "the size of out is not the total size of the records");
    const int64_t held = length ? static_cast<int64_t>(source.size() / length) : INT64_MAX;
    for (size_t i = 0; i < rows.size(); ++i)
      if (rows.data()[i] < 0 || rows.data()[i] >= held) throw std::out_of_range("a record lies outside the source");
    nb::gil_scoped_release free;
    gather_rows(source.data(), length, rows.data(), rows.size(), out.data());
  });
  m.def("gather_files", [](Files files, Longs offsets, Longs lengths, Bytes out) {
    require(files.size() == offsets.size(), "files and offsets differ in length");
    check(offsets, lengths, out, -1);
    int error = 0;
    size_t done = 0;
    {
      nb::gil_scoped_release free;
      done = gather_files(files.data(), offsets.data(), lengths.data(), offsets.size(), out.data(), error);
    }
    return std::pair<size_t, int>(done, error);
  });
  m.def("write_rows", [](int file, size_t length, Longs rows, ConstBytes source) {
    require(source.size() == rows.size() * length, "the size of source is not the total size of the records");
    for (size_t i = 0; i < rows.size(); ++i)
      if (rows.data()[i] < 0 || (length && rows.data()[i] > INT64_MAX / static_cast<int64_t>(length) - 1))
        throw std::out_of_range("a record lies outside the file");
    int error = 0;
    size_t done = 0;
    {
      nb::gil_scoped_release free;
      done = write_rows(file, length, rows.data(), rows.size(), source.data(), error);
    }
    return std::pair<size_t, int>(done, error);
  });
}

}  // namespace topkube
