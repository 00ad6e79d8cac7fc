#include "gather.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace topkube {

void gather_memory(const uint8_t* source, const int64_t* offsets, const int64_t* lengths, size_t count, uint8_t* out) {
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(out, source + offsets[i], static_cast<size_t>(lengths[i]));
    out += lengths[i];
  }
}

size_t gather_files(const int32_t* files, const int64_t* offsets, const int64_t* lengths, size_t count, uint8_t* out,
                    int& error) {
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

}  // namespace topkube
