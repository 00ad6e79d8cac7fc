// The headers of consecutive members of a tar archive (POSIX ustar).
#pragma once
#include <cstddef>
#include <cstdint>

namespace topkube {

constexpr size_t kTarBlock = 512, kTarName = 100;

// Scans the members from byte `at` of an archive of `size` bytes on. Stops before the first header that is invalid, or that differs
// from `header` in more than name, owner, length, time and checksum, or whose member does not end within the archive, or after
// `most` members. Returns the number of members. Member i has lengths[i] bytes; its name, which ends with a zero, is appended to
// `names`, which has room for most * (kTarName + 1) bytes. `name_bytes` is their total.
size_t scan_tar(int file, int64_t size, int64_t at, const uint8_t* header, size_t most, int64_t* lengths, char* names,
                size_t& name_bytes);

}  // namespace topkube
