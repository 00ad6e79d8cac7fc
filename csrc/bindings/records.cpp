#include "bindings/bind.hpp"
#include "cpu/records/gather.hpp"
#include "cpu/records/mapping.hpp"
#include "cpu/records/tar.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

namespace topkube {

namespace {

using ConstInt64s = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int64s = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstInt32s = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Checks that every record lies in the source and that `out` has their total size. `source_bytes` is negative if the size of the
// source is unknown.
void check_records(const ConstInt64s& offsets, const ConstInt64s& lengths, const Bytes& out, int64_t source_bytes) {
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

// Checks that every row is below `row_count`.
void check_rows(const ConstInt64s& rows, int64_t row_count) {
  for (size_t i = 0; i < rows.size(); ++i)
    if (rows.data()[i] < 0 || rows.data()[i] >= row_count) throw std::out_of_range("a record lies outside the source");
}

struct Mapping {
  const uint8_t* start;
  size_t bytes;
  ~Mapping() { unmap_file(start, bytes); }
};

using MappedBytes = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>, nb::c_contig>;

}  // namespace

void bind_records(nb::module_& module) {
  module.def("gather_memory", [](ConstBytes source, ConstInt64s offsets, ConstInt64s lengths, Bytes out) {
    check_records(offsets, lengths, out, static_cast<int64_t>(source.size()));
    nb::gil_scoped_release release;
    gather_memory(source.data(), offsets.data(), lengths.data(), offsets.size(), out.data());
  });
  module.def("gather_rows", [](ConstBytes source, size_t length, ConstInt64s rows, Bytes out) {
    require(out.size() == rows.size() * length, "the size of out is not the total size of the records");
    check_rows(rows, length ? static_cast<int64_t>(source.size() / length) : INT64_MAX);
    nb::gil_scoped_release release;
    gather_rows(source.data(), length, rows.data(), rows.size(), out.data());
  });
  module.def("gather_set_rows", [](ConstBytes flags, ConstBytes source, size_t length, ConstInt64s rows, Bytes out) {
    require(out.size() == rows.size() * length, "the size of out is not the total size of the records");
    const int64_t row_count = length ? static_cast<int64_t>(source.size() / length) : INT64_MAX;
    check_rows(rows, std::min(row_count, static_cast<int64_t>(flags.size())));
    nb::gil_scoped_release release;
    if (!are_all_set(flags.data(), rows.data(), rows.size())) return false;
    gather_rows(source.data(), length, rows.data(), rows.size(), out.data());
    return true;
  });
  module.def("gather_samples", [](ConstInt64s starts, ConstInt32s files, ConstInt64s offsets, ConstInt64s lengths,
                                  ConstInt64s samples, int64_t length, Bytes out) {
    require(files.size() > 0 && starts.size() == files.size() + 1, "starts must have one more element than files");
    require(offsets.size() == lengths.size(), "offsets and lengths differ in length");
    require(length >= 0 && out.size() == samples.size() * static_cast<size_t>(length),
            "the size of out is not the total size of the records");
    check_rows(samples, static_cast<int64_t>(offsets.size()));
    const size_t count = samples.size();
    std::vector<int32_t> sample_files(count);
    std::vector<int64_t> sample_offsets(count), sample_lengths(count, length);
    // Another thread may be opening a shard. It holds the GIL while it stores offsets, lengths and then the file. So this thread
    // releases the GIL only after it has read them.
    if (!find_samples(starts.data(), files.data(), files.size(), offsets.data(), lengths.data(), samples.data(), count, length,
                      sample_files.data(), sample_offsets.data()))
      return false;
    nb::gil_scoped_release release;
    int error = 0;
    return gather_files(sample_files.data(), sample_offsets.data(), sample_lengths.data(), count, out.data(), error) == count;
  });
  module.def("gather_files", [](ConstInt32s files, ConstInt64s offsets, ConstInt64s lengths, Bytes out) {
    require(files.size() == offsets.size(), "files and offsets differ in length");
    check_records(offsets, lengths, out, -1);
    int error = 0;
    size_t done = 0;
    {
      nb::gil_scoped_release release;
      done = gather_files(files.data(), offsets.data(), lengths.data(), offsets.size(), out.data(), error);
    }
    return std::pair<size_t, int>(done, error);
  });
  module.def("write_rows", [](int file, size_t length, ConstInt64s rows, ConstBytes source) {
    require(source.size() == rows.size() * length, "the size of source is not the total size of the records");
    for (size_t i = 0; i < rows.size(); ++i)
      if (rows.data()[i] < 0 || (length && rows.data()[i] > INT64_MAX / static_cast<int64_t>(length) - 1))
        throw std::out_of_range("a record lies outside the file");
    int error = 0;
    size_t done = 0;
    {
      nb::gil_scoped_release release;
      done = write_rows(file, length, rows.data(), rows.size(), source.data(), error);
    }
    return std::pair<size_t, int>(done, error);
  });
  module.def("map_file", [](int file, size_t bytes, size_t alignment) {
    const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    require(bytes > 0 && bytes <= PTRDIFF_MAX - alignment, "a mapping has at least one byte, and fits into the address space");
    require(alignment >= page && (alignment & (alignment - 1)) == 0, "the alignment must be a power of two and at least one page");
    const uint8_t* start = map_file(file, bytes, alignment);
    if (start == nullptr) {
      PyErr_SetFromErrno(PyExc_OSError);
      throw nb::python_error();
    }
    std::unique_ptr<Mapping> mapping(new Mapping{start, bytes});
    nb::capsule owner(mapping.get(), [](void* held) noexcept { delete static_cast<Mapping*>(held); });
    mapping.release();
    return MappedBytes(start, {bytes}, owner);
  });
  module.def("collapse_pages", [](ConstBytes mapped, size_t start, size_t bytes) {
    require(start <= mapped.size() && bytes <= mapped.size() - start, "the range lies outside the mapping");
    nb::gil_scoped_release release;
    return collapse_pages(mapped.data() + start, bytes);
  });
  module.def("scan_tar", [](int file, int64_t size, int64_t at, ConstBytes header, Int64s lengths, Bytes names) {
    require(header.size() == kTarBlock && at >= 0 && size >= 0, "the header must have 512 bytes, and offsets must not be negative");
    require(names.size() / (kTarName + 1) >= lengths.size(), "names must have 101 bytes for each length");
    nb::gil_scoped_release release;
    size_t bytes = 0;
    const size_t count =
        scan_tar(file, size, at, header.data(), lengths.size(), lengths.data(), reinterpret_cast<char*>(names.data()), bytes);
    return std::pair<size_t, size_t>(count, bytes);
  });
}

}  // namespace topkube
