// Copies that bypass the caches, for a destination that is larger than the caches and is not read again soon. A plain store would
// first read the cache line that it overwrites.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace topkube {

static inline void stream_copy(void* out, const void* input, std::size_t bytes) {
#if defined(__x86_64__)
  char* to = static_cast<char*>(out);
  const char* from = static_cast<const char*>(input);
  const std::size_t head = std::min<std::size_t>(bytes, (64 - (reinterpret_cast<std::uintptr_t>(to) & 63)) & 63);
  std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  for (; bytes >= 64; bytes -= 64, to += 64, from += 64)
    for (int i = 0; i < 4; ++i)  // whole lines: a partial line would flush the write buffer early
      _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i));
  std::memcpy(to, from, bytes);
#else
  std::memcpy(out, input, bytes);
#endif
}

// Orders streamed stores before later stores. Call it before another thread or process is told that the data is complete.
static inline void end_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace topkube
