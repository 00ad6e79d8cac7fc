#include "cpu/records/tar.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

namespace topkube {

namespace {

// Where the fields of a header begin or end, in bytes (POSIX ustar).
constexpr size_t kMode = 100, kModeEnd = 108, kSize = 124, kSum = 148, kKind = 156, kVersionEnd = 265, kDevices = 329;
constexpr size_t kSumBytes = 8, kSizeDigits = 11, kSumDigits = 6;
// Headers that are at most kClose bytes apart are read together with the bytes between them, at most kMostBytes at a time.
constexpr int64_t kClose = 4096, kMostBytes = 128 << 10;

// Parses octal digits. Returns -1 if another character is among them.
int64_t parse_octal(const uint8_t* text, size_t digits) {
  int64_t value = 0;
  for (size_t i = 0; i < digits; ++i) {
    if (text[i] < '0' || text[i] > '7') return -1;
    value = value * 8 + (text[i] - '0');
  }
  return value;
}

// Returns true if the checksum is valid and has the usual form: six octal digits, a zero and a space.
bool has_valid_checksum(const uint8_t* header) {
  int64_t sum = kSumBytes * ' ';
  for (size_t i = 0; i < kTarBlock; ++i) sum += header[i];
  for (size_t i = kSum; i < kSum + kSumBytes; ++i) sum -= header[i];
  return header[kSum + kSumDigits] == 0 && header[kSum + kSumDigits + 1] == ' ' && parse_octal(header + kSum, kSumDigits) == sum;
}

// Returns true if mode, type, name of a link, version, devices and prefix are equal.
bool are_alike(const uint8_t* a, const uint8_t* b) {
  return !std::memcmp(a + kMode, b + kMode, kModeEnd - kMode) && !std::memcmp(a + kKind, b + kKind, kVersionEnd - kKind) &&
         !std::memcmp(a + kDevices, b + kDevices, kTarBlock - kDevices);
}

// The part of the file that has been read last. It begins at a header.
class Window {
 public:
  Window(int file, int64_t size) : file_(file), size_(size) {}

  // Returns the header at byte `at`, or nullptr if it cannot be read. `stride` is the distance from the header before: if headers
  // are close, each read takes twice as many bytes as the read before.
  const uint8_t* load_header(int64_t at, int64_t stride) {
    constexpr int64_t block = kTarBlock;
    if (at < start_ || at + block > start_ + static_cast<int64_t>(data_.size())) {
      read_bytes_ = stride <= kClose ? std::min(2 * read_bytes_, kMostBytes) : block;
      if (at + block > size_) return nullptr;
      data_.resize(static_cast<size_t>(std::min(std::max(read_bytes_, block), size_ - at)));
      start_ = at;
      for (size_t done = 0; done < data_.size();) {
        const ssize_t got = ::pread(file_, data_.data() + done, data_.size() - done, at + static_cast<int64_t>(done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return nullptr;
        done += static_cast<size_t>(got);
      }
    }
    return data_.data() + (at - start_);
  }

 private:
  int file_;
  int64_t size_, start_ = 0, read_bytes_ = kClose;
  std::vector<uint8_t> data_;
};

}  // namespace

size_t scan_tar(int file, int64_t size, int64_t at, const uint8_t* header, size_t most, int64_t* lengths, char* names,
                size_t& name_bytes) {
  Window window(file, size);
  name_bytes = 0;
  int64_t stride = 0;
  for (size_t i = 0; i < most; ++i) {
    const uint8_t* member = window.load_header(at, stride);
    if (member == nullptr || !are_alike(member, header) || !has_valid_checksum(member)) return i;
    const uint8_t end = member[kSize + kSizeDigits];
    const int64_t length = parse_octal(member + kSize, kSizeDigits);
    if (length < 0 || (end != 0 && end != ' ') || length > size - at - static_cast<int64_t>(kTarBlock)) return i;
    lengths[i] = length;
    const size_t name = ::strnlen(reinterpret_cast<const char*>(member), kTarName);
    std::memcpy(names + name_bytes, member, name);
    names[name_bytes + name] = 0;
    name_bytes += name + 1;
    constexpr int64_t block = kTarBlock;
    stride = block + (length + block - 1) / block * block;
    at += stride;
  }
  return most;
}

}  // namespace topkube
