#include "cpu/records/gather.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "cpu/stream.hpp"

namespace topkube {

namespace {

// A batch of this size is larger than the caches, so it is written past them (stream.hpp).
constexpr size_t kStreamedBytes = size_t{16} << 20;
// The next record can be anywhere in memory, so the processor's own prefetcher cannot predict it, and translating the address of
// its page takes as long as reading the record. So the pages of later records are touched first, and their cache lines a little
// later.
constexpr size_t kFetchedAhead = 3, kLookedUpAhead = 8, kFetchedBytes = 4096;

struct Record {
  const uint8_t* from;
  size_t length;
};

// Copies the records one after the other. record(i) returns the place of record i.
template <class RecordAt>
void gather(size_t count, uint8_t* out, size_t total, RecordAt record) {
  const bool streamed = total >= kStreamedBytes;
  for (size_t i = 0; i < count; ++i) {
    if (i + kLookedUpAhead < count) {
      const Record later = record(i + kLookedUpAhead);
      if (later.length) __builtin_prefetch(later.from), __builtin_prefetch(later.from + later.length - 1);
    }
    if (i + kFetchedAhead < count) {
      const Record next = record(i + kFetchedAhead);
      for (size_t at = 0; at < std::min(next.length, kFetchedBytes); at += 64) __builtin_prefetch(next.from + at);
    }
    const Record now = record(i);
    if (streamed)
      stream_copy(out, now.from, now.length);
    else
      std::memcpy(out, now.from, now.length);
    out += now.length;
  }
  if (streamed) end_stream();
}

}  // namespace

void gather_memory(const uint8_t* source, const int64_t* offsets, const int64_t* lengths, size_t count, uint8_t* out) {
  size_t total = 0;
  for (size_t i = 0; i < count; ++i) total += static_cast<size_t>(lengths[i]);
  gather(count, out, total, [&](size_t i) { return Record{source + offsets[i], static_cast<size_t>(lengths[i])}; });
}

void gather_rows(const uint8_t* source, size_t length, const int64_t* rows, size_t count, uint8_t* out) {
  gather(count, out, count * length, [&](size_t i) { return Record{source + static_cast<size_t>(rows[i]) * length, length}; });
}

size_t gather_files(const int32_t* files, const int64_t* offsets, const int64_t* lengths, size_t count, uint8_t* out, int& error) {
  error = 0;
  for (size_t i = 0; i < count; ++i) {
    int64_t done = 0;
    while (done < lengths[i]) {
      const ssize_t got = ::pread(files[i], out + done, static_cast<size_t>(lengths[i] - done), offsets[i] + done);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        error = got < 0 ? errno : 0;
        return i;
      }
      done += got;
    }
    out += lengths[i];
  }
  return count;
}

bool are_all_set(const uint8_t* flags, const int64_t* rows, size_t count) {
  uint8_t others = 0;
  for (size_t i = 0; i < count; ++i) others |= static_cast<uint8_t>(flags[rows[i]] ^ 1);
  std::atomic_thread_fence(std::memory_order_acquire);
  return others == 0;
}

bool find_samples(const int64_t* starts, const int32_t* files, size_t shards, const int64_t* offsets, const int64_t* lengths,
                  const int64_t* samples, size_t count, int64_t length, int32_t* sample_files, int64_t* sample_offsets) {
  for (size_t i = 0; i < count; ++i) {
    const int64_t* after = std::upper_bound(starts + 1, starts + shards, samples[i]);
    sample_files[i] = files[after - starts - 1];
    sample_offsets[i] = offsets[samples[i]];
    if (sample_files[i] < 0 || lengths[samples[i]] != length) return false;
  }
  return true;
}

size_t write_rows(int file, size_t length, const int64_t* rows, size_t count, const uint8_t* source, int& error) {
  error = 0;
  for (size_t i = 0; i < count; ++i, source += length) {
    const off_t offset = rows[i] * static_cast<int64_t>(length);
    size_t done = 0;
    while (done < length) {
      const ssize_t put = ::pwrite(file, source + done, length - done, offset + static_cast<off_t>(done));
      if (put < 0 && errno == EINTR) continue;
      if (put <= 0) {
        error = put < 0 ? errno : EIO;
        return i;
      }
      done += static_cast<size_t>(put);
    }
  }
  return count;
}

}  // namespace topkube
